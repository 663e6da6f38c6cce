"""Checkpoints in the core: what is retained, how a run goes back, and what it refuses."""

from dataclasses import replace

import pytest

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import (
    Advised,
    Effect,
    FailRanks,
    PlanRequested,
    Rewound,
    StepsEvicted,
)
from rollout_dispatcher.core.facts import (
    CheckpointSaved,
    RecoveredState,
    RetainedEvicted,
)
from rollout_dispatcher.core.steps.rank_state import CheckpointPosition, RankHello
from rollout_dispatcher.errors import CheckpointRefused, ProtocolError, RankRefused
from rollout_planner.planner import plan
from tests.support.core.cores import Bench


class Run(Bench):
    """A bench whose generations load checkpoints, with a journal of its own."""

    def __init__(self, *, retain: bool = True, steps: int = 6, begin: bool = True) -> None:
        super().__init__(batch=4, window=4, capacity=100, durable=True, retain=retain)
        self.perform(self.core.restore(RecoveredState()))
        self.births = 0
        self.push_plain(4 * steps)
        if begin:
            self.begin()

    def begin(self) -> None:
        """A new generation; no rank has loaded anything yet."""
        self.births += 1
        self.say(0, None)
        self.say(1, self.core._ledger.generation.number)

    def say(self, rank: int, generation: int | None, **more: object) -> list[Effect]:
        hello = RankHello(f"{rank}.{self.births}", rank, 2, generation, **more)  # type: ignore[arg-type]
        start = len(self.log)
        self.perform(self.core.join(hello, self.now))
        return self.log[start:]

    def load(
        self, step: int, *ranks: int, run_id: str = "run", lossy: bool = False
    ) -> list[Effect]:
        effects: list[Effect] = []
        for rank in ranks or (0, 1):
            generation = self.core._ledger.generation.number
            effects += self.say(rank, generation, resume=CheckpointPosition(run_id, step, lossy))
        return effects

    def run_to(self, last: int) -> list[str]:
        """Train every step up to there; the digests of those trained."""
        digests = []
        while self.core._ledger.steps.committed < last:
            self.hungry()
            self.pass_time(3.0)
            step = self.core._ledger.steps.committed + 1
            digests.append(self.core._ledger.steps[step].digest)
            self.train(step)
        return digests

    def restart(self) -> None:
        """The dispatcher dies, and another goes on from what was noted."""
        before = self.core
        self.core = DispatcherCore(before.config, "another")
        self.perform(self.core.restore(self.memory.remembered()))


def test_a_saved_checkpoint_releases_what_it_covers_for_good() -> None:
    run = Run()
    run.run_to(3)
    run.facts.clear()
    run.perform(run.core.checkpoint_saved(1, 3))  # only DP rank 0's word counts
    assert run.core.statistics().steps_retained == 4
    for _ in range(2):
        run.perform(run.core.checkpoint_saved(0, 1))
        run.perform(run.core.checkpoint_saved(0, 0))  # late news of an older one changes nothing
    assert run.core.statistics().steps_retained == 2
    assert run.facts == [CheckpointSaved(1)]
    run.begin()
    with pytest.raises(CheckpointRefused, match="oldest that run run can go back to is one after"):
        run.load(0)
    run.load(1)
    assert run.core._ledger.steps.committed == 1


def test_a_checkpoint_of_another_run_or_of_the_future_is_refused_and_changes_nothing() -> None:
    run = Run()
    run.run_to(1)
    run.begin()
    before = run.core.statistics()
    words = r"of run theirs, after its step 1; .* run run, .*load_state_dict\(state, strict=False\)"
    with pytest.raises(CheckpointRefused, match=words):
        run.load(1, run_id="theirs")
    with pytest.raises(CheckpointRefused, match=r"after step 9, and the last step .* is 2"):
        run.load(9)
    assert run.core.statistics() == before


def test_a_rewind_is_applied_once_however_often_it_is_repeated() -> None:
    run = Run()
    run.run_to(4)
    run.begin()
    run.load(1, 0, 0, 1)
    run.run_to(2)
    received = dict.fromkeys(run.core._ledger.steps, 1)
    run.restart()
    for rank in (0, 1):
        run.say(
            rank, run.core._ledger.generation.number, resume=CheckpointPosition("run", 1),
            taken=2, committed=2, received=received,
        )  # fmt: skip
    assert run.core.run_id == "run"
    assert run.core._ledger.steps.committed == 2
    assert run.core.statistics().steps_rewound == 3


def test_a_later_checkpoint_commits_steps_that_a_rewind_has_left_waiting() -> None:
    run = Run()
    run.run_to(4)
    run.begin()
    run.load(1, 0)
    assert run.core.statistics().steps_waiting > 2
    run.begin()
    run.load(3)
    assert run.core._ledger.steps.committed == 3
    run.run_to(5)
    at = run.core.statistics()
    assert (at.steps_waiting, at.balanced) == (0, True)


def test_a_plan_requested_before_a_rewind_becomes_a_step_behind_the_rewound_ones() -> None:
    run = Run()
    run.run_to(2)
    run.hold(3)
    run.perform(run.core.demand(0, 3, run.now, hungry=False))
    effects = run.core.demand(1, 3, run.now, hungry=False).effects
    (wanted,) = [effect for effect in effects if isinstance(effect, PlanRequested)]
    run.begin()
    run.load(0, 0)
    answer = plan(wanted.window, run.plan_config, wanted.take)
    run.perform(run.core.planned(wanted, answer, run.now))
    at = run.core.statistics()
    assert (at.open_steps, at.steps_waiting) == (0, 4)
    run.load(0, 1)
    run.run_to(4)
    assert run.core.statistics().balanced


@pytest.mark.parametrize("other", [3, None])
def test_ranks_that_load_different_checkpoints_all_fail_before_any_step(other: int | None) -> None:
    run = Run()
    run.run_to(4)
    run.begin()
    run.load(1, 0)
    if other is None:
        taken = run.core._ledger.ranks[1].taken
        (failed,) = run.core.demand(1, taken, run.now, hungry=True).effects
    else:
        failed = next(e for e in run.load(other, 1) if isinstance(e, FailRanks))
    assert isinstance(failed, FailRanks)
    assert sorted(failed.client_ids) == ["0.2", "1.2"]
    assert isinstance(failed.error, CheckpointRefused)
    assert "DP rank 1" in str(failed.error)
    with pytest.raises(CheckpointRefused):
        run.load(1, 0)
    run.begin()  # all ranks restart, and agree
    run.load(1)
    assert run.run_to(2)


def test_a_checkpoint_is_loaded_in_a_generation() -> None:
    run = Run()
    with pytest.raises(RankRefused, match="ask for one first"):
        run.say(0, None, resume=CheckpointPosition("run", 0))


def test_a_checkpoint_of_a_step_that_was_never_planned_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="never planned"):
        Run().core.checkpoint_saved(0, 10**6)


def test_word_of_prepared_steps_that_crosses_a_rewind_is_ignored() -> None:
    run = Run()
    run.run_to(3)
    run.begin()
    late = run.core._ledger.steps[4]
    run.load(1, 0)
    assert not run.core.prepared(1, 4, late.digest, run.now).effects
    run.load(1, 1)
    assert run.run_to(4)


def test_after_a_restart_ranks_are_awaited_while_steps_are_not_in_a_checkpoint() -> None:
    run = Run(steps=2)
    run.perform(run.core.end_stream(run.now))
    run.run_to(1)
    run.restart()
    assert not run.core.deserted
    run.core.checkpoint_saved(0, 1)
    assert run.core.deserted


def test_a_dispatcher_that_no_longer_retains_lets_go_of_what_was_retained() -> None:
    run = Run()
    run.run_to(1)
    run.restart()
    assert run.core.statistics().steps_retained == 2
    again = Run(retain=False).core
    restored = again.restore(run.memory.remembered())
    assert again.statistics().steps_retained == 0
    assert RetainedEvicted(1) in restored.facts


@pytest.mark.parametrize("outlives", [False, True])
def test_after_a_restart_with_a_lower_limit_no_more_steps_are_open_than_ranks_hold(
    outlives: bool,
) -> None:
    run = Run()
    for step in range(3):  # taken by both ranks, and not committed
        run.hungry()
        run.pass_time(3.0)
        run.hold(step)
        for rank in (0, 1):
            run.perform(run.core.demand(rank, step, run.now, hungry=False))
    config = replace(run.core.config, max_open_steps=1)
    run.core = DispatcherCore(config, "another")
    run.perform(run.core.restore(run.memory.remembered()))
    assert run.core.statistics().open_steps == 1
    if outlives:
        received = dict.fromkeys(range(3), 1)
        for rank in (0, 1):
            run.say(rank, 1, taken=2, received=received, run_id="run")
        assert run.core.statistics().open_steps == 3
        for rank in (0, 1):
            run.perform(run.core.commit(rank, 2, run.now))
        assert run.core.statistics().steps_committed == 3
    else:
        run.births += 1
        run.begin()
        run.load(-1)
        run.run_to(3)
    at = run.core.statistics()
    assert (at.open_steps <= 1, at.steps_waiting, at.balanced) == (True, 0, True)


def test_the_oldest_retained_steps_go_where_there_is_no_room_for_them() -> None:
    run = Run()
    run.run_to(3)
    room = run.core.retained_bytes // 2
    run.facts.clear()
    run.perform(run.core.retain_at_most(room))
    at = run.core.statistics()
    assert (at.steps_retained, at.steps_evicted, at.balanced) == (2, 2, True)
    assert run.facts == [RetainedEvicted(1)]
    run.run_to(4)  # and no more are kept from now on
    at = run.core.statistics()
    assert (at.steps_retained, at.steps_evicted, run.core.retained_bytes) == (2, 3, room)
    evicted = [effect.steps for effect in run.log if isinstance(effect, StepsEvicted)]
    assert evicted == [2], "reported as they double"
    run.restart()
    run.begin()
    with pytest.raises(
        CheckpointRefused,
        match=r"taken after step 0, and the steps up to 2 .* 2 in all: .* --set retain-bytes, .*"
        r" one after step 2; .* load_state_dict\(state, allow_lost_steps=True\)",
    ):
        run.load(0)
    effects = run.load(0, lossy=True)
    assert Rewound(after=0, steps=2, samples=8, missing=2) in effects
    assert run.core._ledger.steps.committed == 2
    run.run_to(5)
    assert run.core.statistics().balanced


def test_a_step_larger_than_all_room_is_not_kept() -> None:
    run = Run()
    run.perform(run.core.retain_at_most(1))
    run.run_to(2)
    at = run.core.statistics()
    assert (at.steps_retained, at.steps_evicted, at.steps_committed) == (0, 3, 3)


def advice(run: Run) -> list[str]:
    return [effect.text for effect in run.log if isinstance(effect, Advised)]


def test_a_trainer_that_reports_no_checkpoint_is_advised_at_half_of_the_room() -> None:
    run = Run()
    run.run_to(1)
    assert not advice(run)
    assert not run.core.advice
    run.perform(run.core.retain_at_most(4 * run.core.retained_bytes))
    run.run_to(3)
    (text,) = advice(run)
    assert "so far, so 4 committed steps with 16 samples" in text
    assert run.core.advice == text
    run.run_to(4)
    assert len(advice(run)) == 1
    run.perform(run.core.checkpoint_saved(0, 3))
    assert not run.core.advice


def test_a_trainer_that_reports_no_checkpoint_is_advised_after_a_hundred_steps() -> None:
    run = Run(steps=110)
    run.run_to(98)
    assert not advice(run)
    run.run_to(99)
    assert "so 100 committed steps" in advice(run)[0]
    run.begin()
    assert len(advice(run)) == 2  # another trainer


def test_ranks_that_begin_without_a_checkpoint_are_advised_what_is_not_given_again() -> None:
    run = Run()
    run.run_to(1)
    assert not advice(run)
    run.begin()
    run.hungry()
    assert "the samples of the 2 steps after step -1" in advice(run)[0]
    run.begin()
    run.load(-1)
    run.hungry()
    assert len(advice(run)) == 1
