"""Micro-batches of a step that is planned again, and of one that goes on."""

from pathlib import Path
from typing import Any

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Outcome
from tests.service.conftest import Serve
from tests.support.client import Producer, Rank, Trainer
from tests.support.references import STORE, make_references
from tests.support.server import ServeProcess

#: Of each sample: several megabytes a rank, which is more than sockets take.
TOKENS, SAMPLES = 30_000, 32


def test_a_rank_that_reads_late_gets_nothing_of_a_plan_that_is_void(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "dp_size": 2, "global_batch_size": SAMPLES, "window": 1, "micro_batch_size": 1,
        "max_wait": "10ms", "payload_stores": STORE, "journal_dir": tmp_path / "journal",
    }  # fmt: skip
    with ServeProcess(tmp_path, **options) as server:
        producer = Producer(server.endpoint, "p", opens_stores=True)
        producer.send(*make_references("p", 0, [TOKENS] * 2, inline=(1,)))
        assert producer.expect(m.Pushed).of_each(2) == [Outcome.ACCEPTED] * 2
        producer.next_seq = 2
        for _ in range(SAMPLES // 2 - 1):
            producer.push([TOKENS] * 2)
        first_rank = Rank(server.endpoint, 0, 2, opens_stores=True)
        late = Rank(
            server.endpoint, 1, 2,
            generation=first_rank.generation, opens_stores=True, receive_buffer=4096,
        )  # fmt: skip
        for rank in (first_rank, late):
            rank.demand(taken=-1)
        first_rank.hold(0)
        first_rank.send(m.Unresolved(step=0, attempt=0, sample_ids=["p/0"], why="gone"))
        while not isinstance(said := first_rank.receive()[0], m.StepHeader):
            pass
        attempts: list[int] = []
        while attempts.count(1) < said.num_micro_batches:
            heard, _ = late.receive()
            if isinstance(heard, m.StepHeader | m.MicroBatch):
                attempts.append(heard.attempt)
        assert attempts == sorted(attempts)
        assert 1 < attempts.count(0) < said.num_micro_batches


def test_a_live_rank_goes_on_at_the_next_micro_batch(serve: Serve) -> None:
    server = serve(micro_batch_size=1)
    Producer(server.endpoint, "p").push([3] * 4)
    trainer = Trainer(server.endpoint, 2)
    trainer.take()
    first, second = trainer.ranks
    lost = first.steps[0].micro_batches.pop()  # as if the connection had ended just before it
    again = first.reconnect()
    held = again.hold(0)  # a micro-batch that came twice would fail this
    assert held.micro_batches[1:] == [lost]
    again.prepare(0)
    again.await_release(0)
    for rank in (again, second):
        rank.commit(0)
        rank.settle()
    assert server.status()["steps_committed"] == 1
    assert server.scrape()["redeliveries_total{reason=reconnect}"] == 1
