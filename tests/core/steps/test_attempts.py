"""Samples that a DP rank cannot get: they are dropped, and their step is planned again."""

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from rollout_dispatcher.core.effects import (
    Deliver,
    Effect,
    FailRanks,
    Redelivered,
    Release,
    SamplesDropped,
    SamplesUnresolved,
)
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.steps.rank_state import CheckpointPosition, RankHello, Unresolved
from rollout_dispatcher.core.steps.step import StepState
from rollout_dispatcher.errors import CheckpointRefused, GenerationFenced, ProtocolError
from tests.support.core.cores import STORE, Bench
from tests.support.samples import make_sample

BATCH = 4
E_ = TypeVar("E_", bound=Effect)


class Ranks(Bench):
    """Two ranks that hold up to `ahead` steps, and samples in a payload store."""

    def __init__(self, ahead: int = 1, **options: object) -> None:
        super().__init__(batch=BATCH, window=BATCH, capacity=3 * BATCH, durable=True, **options)  # type: ignore[arg-type]
        generation: int | None = None
        for rank in (0, 1):
            self.perform(self.core.join(self.hello(rank, generation, prefetch_steps=ahead), 0.0))
            generation = 1
        self.hungry()

    def hello(self, rank: int, generation: int | None = 1, **options: object) -> RankHello:
        return RankHello(f"r{rank}", rank, 2, generation, **options)  # type: ignore[arg-type]

    def store(self, names: str, **options: object) -> None:
        """A sample for each letter is pushed by reference."""
        self.push(*[make_sample(name, store=STORE, **options) for name in names])  # type: ignore[arg-type]

    def lose(self, rank: int, step: int, names: str, *, attempt: int = 0, why: str = "") -> None:
        self.log.clear()
        missing = Unresolved(step, attempt, tuple(names), why)
        self.perform(self.core.unresolved(rank, missing, self.now))

    def prepare(self, *ranks: int, step: int = 0) -> None:
        self.hold(step, *ranks)

    def effects_of(self, *kinds: type[E_]) -> list[E_]:
        """What was decided since something was lost, of these kinds."""
        return [effect for effect in self.log if isinstance(effect, kinds)]

    def content(self) -> dict[int, str]:
        """The samples of each open step, by name."""
        return {number: "".join(sorted(self.trained(number))) for number in self.core._ledger.steps}

    def attempts(self) -> dict[int, int]:
        return {number: step.attempt for number, step in self.core._ledger.steps.items()}

    def restart(self) -> None:
        """The process dies, and another goes on; ranks are still to come."""
        accepted = self.core.statistics().accepted
        self.log.clear()
        super().restart()
        assert self.core.statistics().accepted == accepted

    def check_books(self) -> None:
        assert self.core.statistics().balanced


def test_what_is_lost_is_dropped_and_the_step_filled_up_with_the_oldest_that_are_there() -> None:
    ranks = Ranks()
    ranks.store("abcdefg")
    first = ranks.core._ledger.steps[0]
    ranks.lose(1, 0, "bc", why="no such file")
    again = ranks.core._ledger.steps[0]
    assert ranks.content() == {0: "adef"}
    assert (again.attempt, again.state, again.planned_at) == (1, StepState.PLANNED, ranks.now)
    assert again.digest != first.digest
    assert ranks.dropped(DropReason.UNRESOLVED) == 2
    (found,) = ranks.effects_of(SamplesDropped)
    assert [entry.sample.sample_id for entry in found.dropped[DropReason.UNRESOLVED]] == ["b", "c"]
    assert ranks.effects_of(SamplesUnresolved) == [SamplesUnresolved(1, 0, 2, "b", "no such file")]
    assert ranks.effects_of(Deliver) == [Deliver(0, 0, attempt=1), Deliver(1, 0, attempt=1)]
    assert ranks.effects_of(Redelivered) == [Redelivered(0, "unresolved")]
    at = ranks.core.statistics()
    assert (at.buffered, at.in_flight, at.steps_planned[Trigger.WINDOW_FULL]) == (1, 4, 1)
    ranks.check_books()


def test_a_checkpoint_of_a_step_that_was_given_again_and_withdrawn_is_refused_and_why() -> None:
    ranks = Ranks(retain=True)
    ranks.store("abcd")
    ranks.train(0)  # a checkpoint is taken here, and an older one loaded

    def load(step: int, generation: int) -> None:
        for rank, of in ((0, None), (1, generation)):
            ranks.perform(ranks.core.join(ranks.hello(rank, of), ranks.now))
        for rank in (0, 1):
            resume = CheckpointPosition("run", step)
            hello = ranks.hello(rank, generation, resume=resume)
            ranks.perform(ranks.core.join(hello, ranks.now))

    load(-1, 2)
    assert ranks.content() == {0: "abcd"}
    ranks.lose(0, 0, "abcd")
    assert ranks.content() == {}
    with pytest.raises(
        CheckpointRefused, match=r"after step 0, which was withdrawn since, .* -1 now"
    ):
        load(0, 3)
    load(-1, 4)
    ranks.hungry()
    ranks.store("efgh")
    assert ranks.content() == {0: "efgh"}
    ranks.check_books()


@pytest.mark.parametrize(
    ("step", "names", "attempt", "words"),
    [
        (0, "x", 0, "sample x of step 0, which is in no payload store, or not of that step"),
        (0, "e", 0, "sample e of step 0, which is in no payload store"),
        (0, "a", 1, "holds attempt 1 at step 0, and the last one .* knows of is 0"),
        (1, "a", 0, "samples of step 1, which is not open"),
    ],
)
def test_what_a_rank_cannot_have_received_is_refused(
    step: int, names: str, attempt: int, words: str
) -> None:
    ranks = Ranks()
    ranks.store("abc")
    ranks.push(make_sample("e"))
    before = ranks.core.statistics()
    with pytest.raises(ProtocolError, match=words):
        ranks.lose(0, step, names, attempt=attempt)
    assert ranks.core.statistics() == before


def test_two_ranks_that_lack_samples_of_one_attempt_count_one_after_the_other() -> None:
    ranks = Ranks()
    ranks.store("abcdefgh")
    ranks.lose(0, 0, "a")
    ranks.lose(1, 0, "b")  # sent before it received that
    assert (ranks.content(), ranks.attempts()) == ({0: "bcde"}, {0: 1})
    ranks.lose(1, 0, "b", attempt=1)
    assert (ranks.content(), ranks.attempts()) == ({0: "cdef"}, {0: 2})


@pytest.mark.parametrize("stands", [{"taken": 0}, {"released": 0, "hungry": True}])
def test_nothing_is_dropped_before_every_rank_has_reported_where_it_resumes(
    stands: dict[str, Any],
) -> None:
    """After a restart one of them may have begun the step, or may any time; only it knows."""
    ranks = Ranks()
    ranks.store("abcdefgh")
    ranks.prepare(0, 1)
    ranks.restart()
    joining = ranks.hello(1, prefetch_steps=1)
    ranks.perform(ranks.core.join(joining, ranks.now))  # a new process
    ranks.perform(ranks.core.demand(1, -1, ranks.now, hungry=True))
    ranks.lose(1, 0, "a")
    assert (ranks.content(), ranks.attempts()) == ({0: "abcd"}, {0: 0})
    trains = ranks.hello(0, received={0: 1}, run_id="run", **stands)
    ranks.perform(ranks.core.join(trains, ranks.now))
    (failed,) = ranks.effects_of(FailRanks)
    assert "other DP ranks may train that step" in str(failed.error)


def test_a_live_rank_goes_on_with_the_attempt_that_it_holds_and_not_with_an_earlier_one() -> None:
    ranks = Ranks()
    ranks.store("abcdef")
    ranks.lose(1, 0, "a")
    for attempts, first in (({}, 0), ({0: 1}, 1)):
        ranks.perform(ranks.core.leave(0, "r0", ranks.now))
        ranks.log.clear()
        hello = ranks.hello(0, received={0: 1}, attempts=attempts, hungry=True)
        ranks.perform(ranks.core.join(hello, ranks.now))
        assert ranks.effects_of(Deliver) == [Deliver(0, 0, first, 1)]


def test_a_rank_that_trains_another_attempt_is_refused() -> None:
    ranks = Ranks()
    ranks.store("abcdef")
    ranks.lose(1, 0, "a")
    ranks.perform(ranks.core.leave(0, "r0", ranks.now))
    with pytest.raises(ProtocolError, match=r"trains attempt 0 at step 0.*restart all ranks"):
        ranks.core.join(ranks.hello(0, taken=0, received={0: 1}), ranks.now)


def unreadable(ranks: Ranks, rank: int, step: int, name: str) -> None:
    """The journal has lost a sample, which the shell sees when it delivers the step."""
    ranks.log.clear()
    missing = Unresolved(step, 0, (name,), "damaged", DropReason.UNREADABLE)
    ranks.perform(ranks.core.unreadable(rank, missing))


def test_what_the_journal_cannot_read_back_is_dropped_before_its_step_is_released() -> None:
    ranks = Ranks()
    ranks.push(*[make_sample(name) for name in "abcdefg"])
    unreadable(ranks, 1, 0, "b")
    held = ranks.core._ledger.steps[0]
    for rank in (0, 1):  # as both have its header, and know nothing of it
        ranks.perform(ranks.core.prepared(rank, 0, held.digest, ranks.now))
    assert not ranks.effects_of(Release)
    ranks.perform(ranks.core.tick(ranks.now))
    assert ranks.content() == {0: "acde"}
    assert ranks.dropped(DropReason.UNREADABLE) == 1
    (found,) = ranks.effects_of(SamplesUnresolved)
    assert (found.first, found.reason) == ("b", DropReason.UNREADABLE)
    ranks.prepare(0, 1)
    assert ranks.effects_of(Release) == [Release((0, 1), 0)]
    ranks.check_books()


def test_what_is_unreadable_of_a_released_step_ends_its_generation_and_not_the_run() -> None:
    ranks = Ranks()
    ranks.push(*[make_sample(name) for name in "abcdefg"])
    ranks.prepare(0, 1)
    unreadable(ranks, 1, 0, "b")
    (failed,) = ranks.effects_of(FailRanks)
    assert isinstance(failed.error, GenerationFenced)
    assert "planned again without what is gone" in str(failed.error)
    ranks.check_books()


def names_after_the_loss(versions: Sequence[int], *, phase: int | None) -> str:
    """What step 0 has after sample `a` is lost; versions: of the samples a, b, and so on."""
    ranks = Ranks(max_staleness=4)
    for name, version in zip("abcdefgh", versions, strict=False):
        ranks.store(name, policy_version=version)
    if phase is not None:
        ranks.perform(ranks.core.end_phase(phase, ranks.now, force=True))
    ranks.lose(0, 0, "a")
    return ranks.content()[0]


def test_a_step_is_not_filled_up_from_a_later_phase() -> None:
    assert names_after_the_loss([0, 0, 0, 0, 1], phase=None) == "bcde"
    assert names_after_the_loss([0, 0, 0, 0, 1], phase=1) == "bcd"
    assert names_after_the_loss([0, 0, 0, 0, 1, 0], phase=1) == "bcdf"


def test_a_step_is_not_filled_up_with_what_is_too_stale_for_it() -> None:
    ranks = Ranks(max_staleness=1)
    ranks.store("abcd", policy_version=3)
    ranks.store("e", policy_version=1)
    ranks.store("f", policy_version=3)
    ranks.perform(ranks.core.set_policy_version(3, ranks.now, 0))
    ranks.lose(0, 0, "a")
    assert ranks.content() == {0: "bcdf"}
