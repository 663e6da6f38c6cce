"""Samples whose payloads lie in payload stores, from their push to the micro-batches of ranks."""

from functools import partial
from signal import SIGKILL

import pytest

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Outcome
from rollout_dispatcher.spans import aligned
from tests.service.conftest import Serve
from tests.support.client import SCHEMA, HeldStep, Producer, Trainer, WireClient, make_span
from tests.support.references import STORE, make_references
from tests.support.server import ServeProcess


@pytest.fixture
def start(start: Serve) -> Serve:
    """With room for more than a step."""
    return partial(start, buffer_capacity=16)


@pytest.fixture
def server(start: Serve) -> ServeProcess:
    return start()


def push(server: ServeProcess, tokens: list[int], inline: tuple[int, ...] = ()) -> m.Pushed:
    with Producer(server.endpoint, "p", opens_stores=True) as producer:
        producer.send(*make_references("p", 0, tokens, inline))
        return producer.expect(m.Pushed)


def places(parts: list[HeldStep]) -> dict[str, tuple[str, int] | None]:
    """Of each sample the key of its object and where it begins there, as ranks were told."""
    found: dict[str, tuple[str, int] | None] = {}
    for head in (head for part in parts for head, _ in part.micro_batches):
        for name, place in zip(head.sample_ids, head.places or [None] * 9, strict=False):
            objects = head.objects or []
            found[name] = None if place is None else (objects[place[0]].key, place[1])
    return found


def gathered(spans: list[memoryview], tokens: list[int]) -> bytes:
    """The payload of a micro-batch of these samples, computed in another way."""
    cuts = [SCHEMA.slices(size) for size in tokens]
    fields = (
        b"".join(span[cut[at]] for span, cut in zip(spans, cuts, strict=True))
        for at in range(len(SCHEMA.fields))
    )
    return b"".join(values.ljust(aligned(len(values)), b"\0") for values in fields)


def test_both_are_told_where_payloads_may_lie(server: ServeProcess) -> None:
    producer = Producer(server.endpoint, "p", opens_stores=True)
    assert producer.welcome.payload_stores == [STORE]
    assert producer.welcome.inline_limit == 1 << 20
    with Trainer(server.endpoint, 2, opens_stores=True) as trainer:
        assert trainer.ranks[0].welcome.payload_stores == [STORE]
        assert trainer.ranks[0].welcome.prefetch_bytes == 1 << 31


def test_a_rank_is_told_where_its_samples_lie_and_gets_the_others(server: ServeProcess) -> None:
    tokens, inline = [5, 3, 8, 2], (1, 3)
    assert push(server, tokens, inline).of_each(4) == [Outcome.ACCEPTED] * 4
    sizes = SCHEMA.sizes(tokens)
    with Trainer(server.endpoint, 2, opens_stores=True) as trainer:
        parts = trainer.train()
        at = server.scrape()
    assert (at["samples_referenced_total"], at["referenced_bytes_total"]) == (
        2,
        sizes[0] + sizes[2],
    )
    assert at["received_bytes_total"] == sizes[1] + sizes[3]
    assert [part.header.num_referenced for part in parts] == [2, 2]
    assert places(parts) == {
        "p/0": ("p.1/0", 0), "p/1": None, "p/2": ("p.1/0", sizes[0]), "p/3": None,
    }  # fmt: skip
    for head, payload in (each for part in parts for each in part.micro_batches):
        here = [at for at, place in enumerate(head.places or ()) if place is None]
        spans = [
            memoryview(make_span(int(head.sample_ids[at][2:]), head.tokens[at])) for at in here
        ]
        assert payload == gathered(spans, [head.tokens[at] for at in here])


def test_who_cannot_fetch_may_not_join_and_who_cannot_hear_of_it_may_not_refer(
    server: ServeProcess,
) -> None:
    rank = WireClient(server.endpoint)
    rank.send(m.HelloRank(client_id="r", dp_rank=0, dp_size=2))
    assert (
        "start the dispatcher without --payload-stores" in rank.expect_error("rank-refused").message
    )
    unable = Producer(server.endpoint, "p")
    assert unable.welcome.payload_stores == []
    assert unable.welcome.inline_limit is None
    unable.send(*make_references("p", 0, [5]))
    assert "need `opens_stores` in the hello" in unable.expect_error("protocol").message


def test_a_killed_dispatcher_remembers_where_payloads_lie(start: Serve) -> None:
    tokens, inline = [5, 3, 8, 2, 7, 1, 9, 4], 1
    killed = start()
    push(killed, tokens, (inline,))
    with Trainer(killed.endpoint, 2, opens_stores=True) as trainer:
        before = trainer.take()
    killed.send_signal(SIGKILL)
    killed.wait()
    server = start()
    assert server.status()["balanced"]
    with Trainer(server.endpoint, 2, opens_stores=True) as trainer:
        again = trainer.train()
        last = trainer.train()
    assert [part.micro_batches for part in again] == [part.micro_batches for part in before]
    sizes = [0 if at == inline else size for at, size in enumerate(SCHEMA.sizes(tokens))]
    assert places(again) | places(last) == {
        f"p/{at}": None if at == inline else ("p.1/0", sum(sizes[:at])) for at in range(8)
    }


def test_what_could_not_be_released_is_asked_for_again_also_after_a_kill(start: Serve) -> None:
    killed = start()
    with Producer(killed.endpoint, "p", opens_stores=True) as producer:
        producer.send(*make_references("p", 0, [5, 3, 8, 2]))
        producer.expect(m.Pushed)
        with Trainer(killed.endpoint, 2, opens_stores=True) as trainer:
            trainer.train()
        producer.expect(m.Free)
        killed.send_signal(SIGKILL)
        killed.wait()
    server = start()
    with Producer(server.endpoint, "q", opens_stores=True) as producer:
        free = producer.expect(m.Free)
        assert (free.store, free.keys) == (STORE, ["p.1/0"])
        producer.send(m.Freed(number=free.number, left=free.keys, why="it is read-only"))
        again = producer.expect(m.Free)
        assert again.keys == free.keys
        producer.send(m.Freed(number=again.number))
        producer.ping()
    objects = server.status()["objects"]
    assert (objects["unneeded"], objects["freed"], objects["failures"]) == (0, 1, 1)


def test_a_store_that_is_not_known_here_is_allowed_and_told_of(start: Serve) -> None:
    server = start(payload_stores="s3://bucket/run-7,file:///mnt/rollouts")
    with Producer(server.endpoint, "p", opens_stores=True) as producer:
        assert producer.welcome.payload_stores == ["s3://bucket/run-7", "file:///mnt/rollouts"]
    assert "no store of the scheme s3 is installed here" in server.log()
    assert "scheme file" not in server.log()
