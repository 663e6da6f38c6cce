"""Samples whose payloads lie in payload stores, from their push to the micro-batches of ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from signal import SIGKILL

import pytest

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Outcome
from rollout_dispatcher.spans import aligned
from tests.service.conftest import Serve
from tests.support.client import SCHEMA, HeldStep, Producer, Trainer, make_span
from tests.support.references import ABLE, STORE, make_references
from tests.support.server import ServeProcess

Start = Callable[..., ServeProcess]


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Start:
    """Starts a dispatcher, on the journal of the one before."""
    return partial(
        serve,
        dp_size=2,
        dispatch_batch_size=4,
        micro_batch_size=2,
        buffer_capacity=16,
        payload_stores=STORE,
        journal_dir=tmp_path / "journal",
    )


@pytest.fixture
def server(start: Start) -> ServeProcess:
    return start()


def push(server: ServeProcess, tokens: list[int], inline: tuple[int, ...] = ()) -> m.Pushed:
    with Producer(server.endpoint, "p", capabilities=ABLE) as producer:
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
    producer = Producer(server.endpoint, "p", capabilities=ABLE)
    assert producer.welcome.payload_stores == [STORE]
    assert producer.welcome.inline_limit == 1 << 20
    with Trainer(server.endpoint, 2, capabilities=ABLE) as trainer:
        assert trainer.ranks[0].welcome.payload_stores == [STORE]
        assert trainer.ranks[0].welcome.prefetch_bytes == 1 << 31


def test_a_rank_is_told_where_its_samples_lie_and_gets_the_others(server: ServeProcess) -> None:
    tokens, inline = [5, 3, 8, 2], (1, 3)
    assert push(server, tokens, inline).of_each(4) == [Outcome.ACCEPTED] * 4
    sizes = SCHEMA.sizes(tokens)
    with Trainer(server.endpoint, 2, capabilities=ABLE) as trainer:
        parts = trainer.train()
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


def test_a_killed_dispatcher_remembers_where_payloads_lie(start: Start) -> None:
    tokens, inline = [5, 3, 8, 2, 7, 1, 9, 4], 1
    killed = start()
    push(killed, tokens, (inline,))
    with Trainer(killed.endpoint, 2, capabilities=ABLE) as trainer:
        before = trainer.take()
    killed.send_signal(SIGKILL)
    killed.wait()
    server = start()
    assert server.status()["balanced"]
    with Trainer(server.endpoint, 2, capabilities=ABLE) as trainer:
        again = trainer.train()
        last = trainer.train()
    assert [part.micro_batches for part in again] == [part.micro_batches for part in before]
    sizes = [0 if at == inline else size for at, size in enumerate(SCHEMA.sizes(tokens))]
    assert places(again) | places(last) == {
        f"p/{at}": None if at == inline else ("p.1/0", sum(sizes[:at])) for at in range(8)
    }
