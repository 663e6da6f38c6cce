"""A hung rank is named, and not those that wait for it; a pause of all ranks names none."""

import pytest

from rollout_dispatcher.core.waiting import FIRST_SECONDS, LEAST_SECONDS, Cause
from tests.support.core.cores import Bench

STEP_S = 30.0


class Training(Bench):
    """Two ranks that have trained a few steps, of half a minute each, and hold the next one."""

    def __init__(self, steps: int = 4, *, step_s: float = STEP_S, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.join()
        for step in range(steps + 1):
            self.hungry()
            self.push_plain(4)
            self.pass_time(3.0)  # --max-wait
            self.take(step, 0, 1)
            if step < steps:
                self.pass_time(step_s)
                self.commit(step, 0, 1)
        self.step = steps

    def take(self, step: int, *ranks: int) -> None:
        self.hold(step)
        for rank in ranks:
            self.perform(self.core.demand(rank, step, self.now, hungry=False))

    def commit(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            self.perform(self.core.commit(rank, step, self.now))

    def beat(self, seconds: float, *progress: tuple[int, int]) -> None:
        """Heartbeats every five seconds, of each rank with what it says of its progress."""
        for _ in range(int(seconds / 5)):
            self.pass_time(5.0)
            for rank, (handed_out, collectives) in enumerate(progress):
                self.core.progressed(rank, handed_out, collectives, self.now)

    def reasons(self) -> dict[Cause, str]:
        return {reason.cause: reason.text for reason in self.core.reasons(self.now)}

    def hung(self) -> tuple[int, ...] | None:
        found = self.core.stall(self.now)
        return None if found is None else found.hung


@pytest.mark.parametrize(
    ("progress", "where"),
    [
        (((5, 0), (3, 0)), "hangs in step 4, 3 of its micro-batches handed out, and 5 on others"),
        (((5, 90), (5, 89)), "hangs in step 4, before a collective that others have begun"),
    ],
    ids=["micro-batches", "collectives"],
)
def test_the_rank_that_is_behind_is_named_and_nobody_else(
    progress: tuple[tuple[int, int], ...], where: str
) -> None:
    run = Training()
    run.beat(3 * STEP_S, *progress)
    assert run.hung() is None, "three usual steps from when they got on last"
    run.beat(10, *progress)
    assert run.hung() == (1,)
    assert run.reasons()[Cause.HUNG_RANKS] == (
        f"DP rank 1 {where}; the other DP ranks wait for it: no DP rank has progressed for 95 s, "
        "and a step usually takes 30 s"
    )
    assert Cause.OPEN_STEPS not in run.reasons(), "which would name them all"


@pytest.mark.parametrize(("step_s", "shown"), [(0.0521, "0.052"), (0.2, "0.2"), (1.6, "2")])
def test_what_a_short_step_usually_takes_is_shown_in_parts_of_a_second(
    step_s: float, shown: str
) -> None:
    run = Training(step_s=step_s)
    run.beat(100, (5, 0), (3, 0))
    assert f"and a step usually takes {shown} s" in run.reasons()[Cause.HUNG_RANKS]


def test_a_rank_that_does_not_commit_or_begin_a_step_is_named() -> None:
    run = Training()
    run.commit(4, 0)
    run.beat(100, (0, 0), (0, 0))
    assert run.hung() == (1,)
    assert "DP rank 1 hangs before the commit of step 4;" in run.core.waits_for(run.now)
    run.commit(4, 1)
    run.hungry()
    run.push_plain(4)
    run.pass_time(3.0)
    run.take(5, 0)
    run.beat(100, (0, 0), (0, 0))
    assert run.hung() == (1,)
    assert "DP rank 1 hangs before step 5;" in run.core.waits_for(run.now)


def test_whoever_gets_on_again_is_named_no_more() -> None:
    run = Training()
    run.beat(100, (5, 0), (3, 0))
    assert run.hung() == (1,)
    run.beat(5, (5, 0), (4, 0))
    assert run.hung() is None
    run.beat(90, (5, 0), (4, 0))
    assert run.hung() == (1,)


def test_ranks_that_are_alike_are_paused_and_none_is_named() -> None:
    run = Training()
    run.beat(300, (5, 7), (5, 7))
    assert run.hung() == ()
    assert run.reasons()[Cause.PAUSED_RANKS] == (
        "all DP ranks stand still at the same place of step 4: no DP rank has progressed for "
        "295 s, and a step usually takes 30 s. A pause (evaluation, weight sync), or a hang in "
        "which no rank is behind the others"
    )


def test_ranks_that_hold_no_step_or_wait_for_samples_are_not_spoken_of() -> None:
    run = Training()
    run.commit(4, 0, 1)
    run.beat(3600, (0, 0), (0, 0))
    assert run.hung() is None
    run = Training()  # a loop that asks for the next step before it commits this one
    run.hungry()
    run.beat(3600, (0, 0), (0, 0))
    assert run.hung() is None
    assert Cause.SAMPLES in run.reasons()


def test_before_a_step_was_committed_it_takes_as_long_as_a_collective_may() -> None:
    run = Training(steps=0)
    run.beat(FIRST_SECONDS - 10, (5, 0), (3, 0))
    assert run.hung() is None
    run.beat(20, (5, 0), (3, 0))
    assert run.hung() == (1,)
    assert "no DP rank has progressed for 605 s" in run.reasons()[Cause.HUNG_RANKS]


def test_short_steps_have_a_least_patience_and_a_new_group_learns_anew() -> None:
    run = Training()
    for _ in range(20):  # the median of the last ones, which are short
        run.commit(run.step, 0, 1)
        run.step += 1
        run.hungry()
        run.push_plain(4)
        run.pass_time(3.0)
        run.take(run.step, 0, 1)
        run.pass_time(1.0)
    run.beat(LEAST_SECONDS, (5, 0), (3, 0))
    assert run.hung() is None
    run.beat(10, (5, 0), (3, 0))
    assert run.hung() == (1,)
    run.join()  # a new generation
    assert run.hung() is None
    run.take(run.step, 0, 1)
    run.beat(LEAST_SECONDS + 10, (5, 0), (3, 0))
    assert run.hung() is None


def test_a_rank_that_is_away_has_another_reason() -> None:
    run = Training()
    run.perform(run.core.leave(1, "r1", run.now))
    run.beat(300, (5, 0))
    assert run.hung() is None
    assert Cause.ABSENT_RANKS in run.reasons()
