"""What the service says of itself: since when a reason is there, and a line now and then."""

import logging
import re

import pytest

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.rank_time import TimeCause
from rollout_dispatcher.core.waiting import FIRST_SECONDS, Cause
from rollout_dispatcher.errors import DispatcherError, JournalFull
from rollout_dispatcher.service.connections.clients import Client
from rollout_dispatcher.service.reporter import (
    INTERVAL_SECONDS,
    DropsLog,
    Health,
    LostTime,
    RunLog,
    producer_gone,
)
from tests.service.conftest import Serve
from tests.service.wires import make_router
from tests.support.client import Producer, Trainer
from tests.support.core.cores import Bench
from tests.support.samples import make_sample
from tests.support.server import eventually


class Watched:
    """A core that is looked at as often as the service does; its ranks have joined.

    progress: seconds between two lines on how the run gets on; None for none.
    """

    def __init__(self, progress: float | None = None, *, joined: bool = True) -> None:
        self.bench = bench = Bench()
        self.failure: DispatcherError | None = None
        self.health = Health(bench.core, lambda: self.failure, lambda: bench.now)
        self.log = RunLog(bench.core, self.health, progress, bench.now)
        if joined:
            bench.join()

    def passes(self, seconds: float) -> None:
        for _ in range(int(4 * seconds)):
            self.bench.pass_time(0.25)
            self.health.refresh(self.bench.now)
            self.log.check(self.bench.now)

    def trains(self, step: int) -> None:
        """A step of four samples."""
        self.bench.hungry()
        self.bench.push_plain(4)
        self.bench.train(step)

    def ages(self) -> dict[Cause, float]:
        return {delay.cause: round(delay.seconds) for delay in self.health.delays()}


# -- reasons


def test_each_reason_has_an_age_of_its_own() -> None:
    watched = Watched(joined=False)
    watched.health.refresh(watched.bench.now)
    watched.passes(30)
    watched.bench.join()
    watched.passes(10)
    assert watched.ages() == {Cause.SAMPLES: 40, Cause.PRODUCERS: 40}
    watched.bench.perform(watched.bench.core.producer_connected("p"))
    watched.passes(10)
    assert watched.ages() == {Cause.SAMPLES: 50}
    assert watched.health.explain() == "0 of 4 samples are ready (50 s)"


def test_after_a_step_the_same_reason_is_a_new_one() -> None:
    watched = Watched()
    watched.passes(30)
    watched.trains(0)  # a step is planned, and samples lack again
    watched.passes(5)
    assert watched.ages()[Cause.SAMPLES] <= 6


def test_a_reason_that_was_away_begins_anew() -> None:
    watched = Watched()
    watched.failure = JournalFull("no room")
    watched.passes(20)
    assert watched.ages()[Cause.JOURNAL] == 20
    watched.failure = None
    watched.passes(5)
    watched.failure = JournalFull("no room")
    watched.passes(200)
    assert 199 <= watched.ages()[Cause.JOURNAL] <= 200
    first = watched.health.explain().partition(";")[0]
    assert first == "the journal cannot be written: no room (3 min)"
    assert not watched.health.is_ready(watched.bench.core.statistics())


def test_slow_ranks_are_named_while_any_rank_is_connected() -> None:
    watched = Watched()
    bench = watched.bench
    for step in range(4):
        watched.trains(step)
        for rank, computed in enumerate((1.0, 1.5)):
            bench.perform(
                bench.core.step_times(rank, RankTimes(step, "update", [2], [2 - computed]))
            )
    assert watched.health.slow_ranks(watched.bench.core.statistics()).startswith(
        "DP rank 1 takes 1.50 times as long"
    )
    for rank in range(2):
        bench.perform(bench.core.leave(rank, f"r{rank}", bench.now))
    assert watched.health.slow_ranks(bench.core.statistics()) == ""


@pytest.mark.parametrize(("reason", "level"), [("eof", "WARNING"), ("run-finished", "INFO")])
def test_a_producer_that_is_sent_away_at_the_end_of_the_run_is_no_warning(
    reason: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    producer_gone(Client("p", "producer", "10.0.0.1"), reason)
    (line,) = caplog.records
    assert (line.levelname, line.event) == (level, "producer-gone")  # type: ignore[attr-defined]


# -- stalls


def test_ranks_that_wait_are_spoken_of_after_ten_seconds_and_each_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    watched.bench.hungry()
    watched.passes(9.5)
    assert caplog.messages == []
    watched.passes(140.0)
    waited = [message.partition(" for a step")[0] for message in caplog.messages]
    assert waited == [f"ranks have waited {seconds} s" for seconds in (10, 70, 130)]
    assert "0 of 4 samples are ready" in caplog.messages[0]


def test_ranks_that_have_work_again_are_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.bench.hungry()
    watched.passes(5.0)
    watched.bench.push_plain(4)
    watched.passes(5.0)
    watched.bench.train(0)
    watched.passes(60.0)
    assert caplog.messages == []


def test_a_rank_that_hangs_is_spoken_of_though_nobody_asks_for_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched()
    bench = watched.bench
    bench.hungry()
    bench.push_plain(4)
    bench.pass_time(3.0)
    for rank in (0, 1):
        digest = bench.core._ledger.steps[0].digest
        bench.perform(bench.core.prepared(rank, 0, digest, bench.now))
    for rank in (0, 1):
        bench.perform(bench.core.demand(rank, 0, bench.now, hungry=False))
    watched.passes(FIRST_SECONDS + 1)
    (paused,) = caplog.messages
    assert paused.startswith("training stands still: all DP ranks stand still at the same place")
    bench.core.progressed(1, 2, 0, bench.now)  # so the other one is behind
    watched.passes(FIRST_SECONDS + 61)
    hung = caplog.messages[1:]
    assert len(hung) == 2, "at once, and again after a minute"
    assert all(text.startswith("training stands still: DP rank 0 hangs in step 0") for text in hung)


# -- progress


def progress_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "samples/s: " in message]


def test_a_line_says_what_has_changed_and_then_there_is_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    watched = Watched(10.0)
    for step in range(3):
        watched.trains(step)
    watched.passes(9.5)
    assert progress_of(caplog) == []
    watched.passes(100)
    (line,) = progress_of(caplog)
    assert line.startswith(
        "3 steps (+3), samples/s: 1.2 accepted, 1.2 trained on; 0 ready of a window of 6, "
        "DP ranks 2 of 2, producers 1; lost: 0 % of the ranks' time in 10 s; the next "
        "step waits for: 0 of 4"
    )
    watched.bench.push_plain(2)
    watched.passes(10)
    assert "3 steps (+0), samples/s: 0.2 accepted, 0 trained on; 2 ready" in progress_of(caplog)[1]


def test_it_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    watched = Watched(None)
    watched.trains(0)
    watched.passes(100)
    assert progress_of(caplog) == []


def test_the_service_says_how_the_run_gets_on(serve: Serve) -> None:
    server = serve(progress_interval="300ms")
    Producer(server.endpoint, "p").push([3, 4])
    eventually(lambda: "0 steps (+0), samples/s: " in server.log(), "a line")
    eventually(lambda: re.search(r"DP ranks 0 of 2, producers 0", server.log()), "it has left")


# -- the journal


def test_a_failing_journal_is_logged_when_it_begins_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    watched.passes(1)
    assert caplog.messages == []
    for words in ("no room: free some", "no room at all"):
        watched.failure = JournalFull(words)
        watched.passes(1)
    assert caplog.messages == [
        "the journal cannot be written, and nothing is acknowledged: no room: free some"
    ]
    watched.failure = None
    watched.passes(1)
    assert caplog.messages[1:] == [
        "the journal can be written again; what waited for it is answered"
    ]


# -- drops


def entries(*names: str) -> list[Entry]:
    return [Entry(make_sample(name, 4), ticket, 0.0) for ticket, name in enumerate(names)]


def test_a_reason_is_told_at_once_and_then_what_has_gathered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = DropsLog()
    log.note({DropReason.STALE: entries("a")}, 0.0)
    log.note({DropReason.STALE: entries("b", "c")}, 1.0)
    log.note({DropReason.STALE: entries(*"defghijkl")}, 2.0)
    why = "older than --max-staleness allows when their step was planned"
    first = f"1 accepted sample is dropped (stale), {why}: a"
    assert caplog.messages == [first]
    log.check(INTERVAL_SECONDS - 1)
    assert caplog.messages == [first]
    log.check(INTERVAL_SECONDS)
    log.check(3 * INTERVAL_SECONDS)
    rest = f"11 accepted samples are dropped (stale), {why}: b, c, d, e, f, g, h, i and 3 more"
    assert caplog.messages == [first, rest]


def test_ranks_that_are_all_gone_are_logged_every_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    watched.trains(0)
    bench = watched.bench
    bench.perform(bench.core.leave(1, "r1", bench.now))
    watched.passes(60)
    assert "no DP rank is connected" not in caplog.text
    bench.perform(bench.core.leave(0, "r0", bench.now))
    watched.passes(75)
    lines = [line for line in caplog.messages if "no DP rank is connected" in line]
    assert len(lines) == 2
    assert "DP ranks 0, 1 of 2 left without a goodbye" in lines[0]


def test_each_reason_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = DropsLog()
    log.note({reason: entries("a") for reason in DropReason}, 0.0)
    told = [re.findall(r"\((.*?)\)", line)[0] for line in caplog.messages]
    assert sorted(told) == [
        "incomplete-group", "last-batch", "oversize", "schema", "stale", "superseded", "unused",
    ]  # fmt: skip


async def test_the_end_logs_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    router = make_router()
    router.drops_log.note({DropReason.STALE: entries("a")}, 0.0)
    (old,) = entries("b")
    old.oldest = 3
    router.drops_log.note({DropReason.STALE: [old]}, 0.0)
    router.close()
    assert [line.rpartition(": ")[2] for line in caplog.messages] == ["a", "b of version 3"]


def test_the_service_says_it_and_the_end_sums_up(serve: Serve) -> None:
    server = serve(
        on_oversize="drop", micro_batch_tokens=16, global_batch_size=2, buffer_capacity=8
    )
    producer = Producer(server.endpoint, "p")
    assert producer.push([4, 17, 4]).outcomes == ["accepted"] * 3
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        producer.end_stream()
        assert trainer.train() == []
        trainer.bye()
    producer.close()
    assert server.wait() == 0
    assert "1 accepted sample is dropped (oversize), longer than --micro-batch-tokens" in (
        server.log()
    )
    assert "every step is committed; of 3 accepted samples some were dropped: oversize 1" in (
        server.log()
    )


def test_the_log_names_the_fields_of_the_first_step(serve: Serve) -> None:
    server = serve(global_batch_size=2)
    Producer(server.endpoint, "p").push([4, 4])
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        assert re.search(r"samples have the fields \w+ \w+\[tokens\]", server.log())


@pytest.mark.parametrize(
    ("waited", "shown"),
    [(60.0, "100 %"), (59.5, "99 %"), (6.0, "10 %"), (0.144, "0.24 %")],
)
def test_shares_are_written_as_people_write_them(waited: float, shown: str) -> None:
    spent = dict.fromkeys(TimeCause, 0.0)
    spent |= {TimeCause.NO_SAMPLES: waited, TimeCause.WORK: 60.0 - waited}
    assert str(LostTime(spent, 60.0)).startswith(f"{shown} of the ranks' time in 60 s: {shown} no-")
