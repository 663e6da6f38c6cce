"""The log says whom ranks wait for: not at once, and not often."""

import pytest

from rollout_dispatcher.service.stall_log import StallLog
from tests.support.core.cores import Bench

#: Seconds between looks.
LOOK = 0.25


def watch(bench: Bench, stalls: StallLog, seconds: float) -> None:
    """Look as often as the service does."""
    for _ in range(int(seconds / LOOK)):
        bench.pass_time(LOOK)
        stalls.check(bench.now)


def test_ranks_that_wait_are_spoken_of_after_ten_seconds_and_each_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    stalls = StallLog(bench.core)
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
    stalls = StallLog(bench.core)
    bench.join()
    bench.hungry()
    watch(bench, stalls, 5.0)
    bench.push_plain(4)
    watch(bench, stalls, 5.0)
    bench.train(0)
    watch(bench, stalls, 60.0)
    assert caplog.messages == []
