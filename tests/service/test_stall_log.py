"""The log says whom ranks wait for: not at once, and not often."""

import logging

import pytest

from rollout_dispatcher.core.waiting import FIRST_SECONDS
from rollout_dispatcher.service.reporter import Health, StallLog
from tests.support.core.cores import Bench

#: Seconds between looks.
LOOK = 0.25


def stall_log(bench: Bench) -> StallLog:
    return StallLog(bench.core, Health(bench.core, lambda: None, lambda: bench.now))


def watch(bench: Bench, stalls: StallLog, seconds: float) -> None:
    """Look as often as the service does."""
    for _ in range(int(seconds / LOOK)):
        bench.pass_time(LOOK)
        stalls.check(bench.now)


def test_ranks_that_wait_are_spoken_of_after_ten_seconds_and_each_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    stalls = stall_log(bench)
    bench.join()
    bench.hungry()
    watch(bench, stalls, 9.5)
    assert caplog.messages == []
    watch(bench, stalls, 140.0)
    waited = [message.partition(" for a step")[0] for message in caplog.messages]
    assert waited == [f"ranks have waited {seconds} s" for seconds in (10, 70, 130)]
    assert "0 of 4 samples are ready" in caplog.messages[0]


def test_ranks_that_have_work_again_are_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    stalls = stall_log(bench)
    bench.join()
    bench.hungry()
    watch(bench, stalls, 5.0)
    bench.push_plain(4)
    watch(bench, stalls, 5.0)
    bench.train(0)
    watch(bench, stalls, 60.0)
    assert caplog.messages == []


def test_a_rank_that_hangs_is_spoken_of_though_nobody_asks_for_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench()
    stalls = stall_log(bench)
    bench.join()
    bench.hungry()
    bench.push_plain(4)
    bench.pass_time(3.0)
    for rank in (0, 1):
        digest = bench.core._ledger.steps[0].digest
        bench.perform(bench.core.prepared(rank, 0, digest, bench.now))
    for rank in (0, 1):
        bench.perform(bench.core.demand(rank, 0, bench.now, hungry=False))
    watch(bench, stalls, FIRST_SECONDS + 1)
    (paused,) = caplog.messages
    assert paused.startswith("training stands still: all DP ranks stand still at the same place")
    bench.core.progressed(1, 2, 0, bench.now)  # so the other one is behind
    watch(bench, stalls, FIRST_SECONDS + 61)
    hung = caplog.messages[1:]
    assert len(hung) == 2, "at once, and again after a minute"
    assert all(text.startswith("training stands still: DP rank 0 hangs in step 0") for text in hung)
