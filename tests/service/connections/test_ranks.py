"""Ranks: a step is prepared by all, then released to all, and committed when all have said so."""

import numpy as np

from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import Serve
from tests.support.client import HeldStep, Producer, Rank, Trainer, WireClient
from tests.support.server import ServeProcess


def two_ranks(server: ServeProcess) -> tuple[Rank, Rank]:
    first = Rank(server.endpoint, 0, 2)
    return first, Rank(server.endpoint, 1, 2, generation=first.generation)


def two_ranks_one_prepared(server: ServeProcess) -> tuple[Rank, Rank]:
    """Both hold step 0; the first has said that it is prepared."""
    Producer(server.endpoint, "p").push([3] * 4)
    first, second = two_ranks(server)
    for rank in (first, second):
        rank.demand(taken=-1)
    for rank in (first, second):
        rank.hold(0)
    first.prepare(0)
    return first, second


def token_ids(step: HeldStep) -> list[int]:
    """The input_ids that a rank received of a step; the first field of its payloads."""
    found: list[int] = []
    for header, payload in step.micro_batches:
        total = sum(header.tokens)
        found += np.frombuffer(payload[: 8 * total], np.int64).tolist()
    return found


def expected_ids(step: HeldStep) -> list[int]:
    """What `make_span` has put there: token k of sample p/n is 1000 n + k."""
    found: list[int] = []
    for header, _ in step.micro_batches:
        for name, tokens in zip(header.sample_ids, header.tokens, strict=True):
            first = 1000 * int(name.partition("/")[2])
            found += range(first, first + tokens)
    return found


def test_what_was_pushed_is_what_the_ranks_get(serve: Serve) -> None:
    server = serve(micro_batch_size=1)
    Producer(server.endpoint, "p").push([7, 2, 30, 11])
    with Trainer(server.endpoint, 2) as trainer:
        parts = trainer.train()
    assert sorted(name for part in parts for name in part.sample_ids) == [
        "p/0", "p/1", "p/2", "p/3",
    ]  # fmt: skip
    header = parts[0].header
    assert (header.num_samples, header.tokens, header.num_micro_batches) == (4, 50, 2)
    assert (header.loss_tokens, header.loss_samples) == (46, 4)
    assert all(token_ids(part) == expected_ids(part) for part in parts)


def test_a_live_rank_goes_on_at_the_next_micro_batch(serve: Serve) -> None:
    server = serve(micro_batch_size=1)
    Producer(server.endpoint, "p").push([3] * 4)
    trainer = Trainer(server.endpoint, 2)
    trainer.take()
    first, second = trainer.ranks
    lost = first.steps[0].micro_batches.pop()  # as if the connection had ended just before it
    again = first.reconnect()
    held = again.hold(0)  # a micro-batch that came twice would fail this
    assert len(held.micro_batches) == 2
    assert held.micro_batches[1] == lost
    again.prepare(0)
    again.await_release(0)
    for rank in (again, second):
        rank.commit(0)
        rank.settle()
    assert server.status()["steps_committed"] == 1
    assert server.scrape()["redeliveries_total{reason=reconnect}"] == 1


def test_rank_0_may_ask_again_when_it_did_not_hear_the_answer(serve: Serve) -> None:
    server = serve()
    Rank(server.endpoint, 0, 2, client_id="zero")
    again = Rank(server.endpoint, 0, 2, client_id="zero")
    assert again.generation == 2
    again.settle()
    other = Rank(server.endpoint, 1, 2, generation=2)
    Producer(server.endpoint, "p").push([3] * 4)
    again.hold(0)
    other.hold(0)


def test_ranks_that_disagree_on_a_plan_are_all_told(serve: Serve) -> None:
    server = serve()
    first, second = two_ranks_one_prepared(server)
    second.send(m.Prepared(step=0, digest="another"))
    for rank in (first, second):
        error = rank.expect_error("fenced")
        assert "DP rank 1 holds another plan of step 0 (digest another, not" in error.message
        assert "all ranks must restart" in error.message
    status = server.status()
    assert (status["ranks_connected"], status["absent_ranks"], status["hungry"]) == (0, [], False)
    assert server.scrape()["ranks_connected"] == 0
    with WireClient(server.endpoint) as late:
        late.send(m.HelloRank(client_id="x", dp_rank=0, dp_size=2, generation=first.generation))
        assert "another plan" in late.expect_error("fenced").message
    assert Trainer(server.endpoint, 2).train()[0].header == first.steps[0].header
    server.await_status(steps_committed=1, balanced=True)


def test_the_last_batch_has_fillers_where_ranks_have_nothing_to_do(serve: Serve) -> None:
    server = serve(global_batch_size=8, micro_batch_size=2)
    producer = Producer(server.endpoint, "p")
    producer.push([6])
    producer.end_stream()
    trainer = Trainer(server.endpoint, 2)
    parts = trainer.train()
    assert [part.header.num_micro_batches for part in parts] == [1, 1]
    heads = [part.micro_batches[0][0] for part in parts]
    assert sorted(head.is_filler for head in heads) == [False, True]
    filler = next(part for part in parts if part.micro_batches[0][0].is_filler)
    head = filler.micro_batches[0][0]
    assert (head.tokens, head.loss_tokens, head.sample_ids) == ([1], [0], ["p/0"])
    assert token_ids(filler) == [0]
    assert (parts[0].header.tokens, parts[0].header.num_samples) == (6, 1)
    assert all(rank.await_end() == "ended" for rank in trainer.ranks)
    trainer.bye()
    assert server.wait() == 0
