"""Since when a reason is there: from when it is first seen, and anew after each step."""

from rollout_dispatcher.core.waiting import Cause
from rollout_dispatcher.errors import DispatcherError, JournalFull
from rollout_dispatcher.service.reporter import Health
from tests.support.core.cores import Bench


class Watched:
    """A core that is looked at as often as the service does."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.failure: DispatcherError | None = None
        self.health = Health(self.bench.core, lambda: self.failure, lambda: self.bench.now)

    def passes(self, seconds: int) -> None:
        for _ in range(4 * seconds):
            self.bench.pass_time(0.25)
            self.health.look(self.bench.now)

    def ages(self) -> dict[Cause, float]:
        return {delay.cause: round(delay.seconds) for delay in self.health.delays()}


def test_each_reason_has_an_age_of_its_own() -> None:
    watched = Watched()
    watched.health.look(watched.bench.now)
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
    watched.bench.join()
    watched.bench.hungry()
    watched.passes(30)
    watched.bench.push_plain(4)  # a step is planned, and samples lack again
    watched.bench.train(0)
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
