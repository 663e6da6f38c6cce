"""One line now and then on how the run gets on, and none while nothing changes."""

import re
from pathlib import Path

import pytest

from rollout_dispatcher.core.rank_time import TimeCause
from rollout_dispatcher.service.reporter import Health, LostTime, ProgressLog
from tests.service.conftest import Serve
from tests.support.client import Producer
from tests.support.core.cores import Bench
from tests.support.server import eventually


class Watched:
    """A core, its metrics and the log, looked at as often as the service does."""

    def __init__(self, interval: float | None) -> None:
        self.bench = bench = Bench()
        self.health = Health(bench.core, lambda: None, lambda: bench.now)
        self.log = ProgressLog(bench.core, self.health, interval, bench.now)

    def passes(self, seconds: float) -> None:
        for _ in range(int(4 * seconds)):
            self.bench.pass_time(0.25)
            self.health.look(self.bench.now)
            self.log.check(self.bench.now)

    def trains(self, step: int) -> None:
        """A step of four samples."""
        self.bench.hungry()
        self.bench.push_plain(4)
        self.bench.train(step)


def test_a_line_says_what_has_changed_and_then_there_is_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    watched = Watched(10.0)
    watched.bench.join()
    for step in range(3):
        watched.trains(step)
    watched.passes(9.5)
    assert caplog.messages == []
    watched.passes(100)
    (line,) = caplog.messages
    assert line.startswith(
        "3 steps (+3), samples/s: 1.2 accepted, 1.2 trained on; 0 ready of a window of 6, "
        "DP ranks 2 of 2, producers 1; lost: 0 % of the ranks' time in 10 s; the next "
        "step waits for: 0 of 4"
    )
    watched.bench.push_plain(2)
    watched.passes(10)
    assert "3 steps (+0), samples/s: 0.2 accepted, 0 trained on; 2 ready" in caplog.messages[1]


@pytest.mark.parametrize(
    ("waited", "shown"),
    [(60.0, "100 %"), (59.5, "99 %"), (6.0, "10 %"), (0.144, "0.24 %")],
)
def test_shares_are_written_as_people_write_them(waited: float, shown: str) -> None:
    spent = dict.fromkeys(TimeCause, 0.0)
    spent |= {TimeCause.NO_SAMPLES: waited, TimeCause.WORK: 60.0 - waited}
    assert str(LostTime(spent, 60.0)).startswith(f"{shown} of the ranks' time in 60 s: {shown} no-")


def test_it_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    watched = Watched(None)
    watched.bench.join()
    watched.trains(0)
    watched.passes(100)
    assert caplog.messages == []


def test_the_service_says_it(serve: Serve) -> None:
    server = serve(progress_interval="300ms")
    Producer(server.endpoint, "p").push([3, 4])
    eventually(lambda: "0 steps (+0), samples/s: " in server.log(), "a line")
    eventually(lambda: re.search(r"DP ranks 0 of 2, producers 0", server.log()), "it has left")


def test_none_switches_it_off_in_the_service(serve: Serve, tmp_path: Path) -> None:
    server = serve(progress_interval="none")
    assert server.status()["config"]["progress_interval"] is None
