"""Trainers' checkpoints: what becomes of committed steps, and how the ledger resumes from one.

A checkpoint's position is the last step that its trainer had said it committed. A generation that
loads one *resumes* after that step, once, however often its ranks repeat it: steps up to there that
are open are committed (the trainer was killed before every rank's word was heard), retained steps
after it are *rewound*, which means open again. Both are facts before any rank is given a step.
Retained steps that there is no room for are evicted, the oldest first: counted, told and a fact.
"""

from rollout_dispatcher.core.effects import Advised, Effect, Rewound, StepCommitted, StepsEvicted
from rollout_dispatcher.core.facts import (
    CheckpointSaved,
    Committed,
    Note,
    Remembered,
    RememberedStep,
    Resumed,
    RetainedEvicted,
)
from rollout_dispatcher.core.references.objects import Objects
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.retained import CheckpointPosition, RetainedSteps
from rollout_dispatcher.core.steps.step import OpenStep, StepState
from rollout_dispatcher.core.totals import Totals
from rollout_dispatcher.errors import ProtocolError


class Checkpoints:
    """Moves steps between the ledger and what is retained, and counts them.

    retain: keep committed steps until a checkpoint that covers them is saved.
    """

    def __init__(
        self, ledger: StepLedger, totals: Totals, objects: Objects, note: Note, *, retain: bool
    ) -> None:
        self.retained = RetainedSteps(keep=retain)
        self._ledger, self._totals, self._objects, self._note = ledger, totals, objects, note
        self._advised, self._evicted_told = False, 0

    def restore(self, memory: Remembered) -> None:
        """Start from what an earlier process left open and retained."""
        steps = [_restored(step, StepState.PLANNED) for step in memory.steps]
        rewound = any(step.rewound for step in memory.steps)
        room = 0 if rewound else self._ledger.max_open_steps
        self._ledger.steps.restore(steps, memory.next_step, memory.withdrawn, room=room)
        self._ledger.generation.restore(memory.generation, memory.dp_size, memory.resumed)
        kept = [_restored(step, StepState.COMMITTED) for step in memory.retained]
        self.retained.restore(kept, memory.saved, memory.evicted)
        self._evict()

    def committed(self, steps: list[OpenStep], now: float) -> list[Effect]:
        """These steps are committed; returns the report of each, and of what follows."""
        for step in steps:
            self._totals.steps_committed += 1
            self._totals.samples_committed += step.num_samples
            retained = self.retained.committed(step)
            self._note(Committed(step.number, retained))
            if not retained:
                self._objects.done(step.entries())
        done = [
            StepCommitted(step.number, step.num_samples, now - step.planned_at) for step in steps
        ]
        return [*done, *self._evict(), *self._advise()]

    def retain_at_most(self, nbytes: int) -> list[Effect]:
        """Payload bytes of retained steps may be so many from now on."""
        self.retained.limit = nbytes
        return [*self._evict(), *self._advise()]

    def _evict(self) -> list[Effect]:
        retained = self.retained
        if not (gone := retained.evict()):
            return []
        for step in gone:
            self._objects.done(step.entries())
        self._totals.steps_evicted += len(gone)
        self._note(RetainedEvicted(retained.evicted))
        total = self._totals.steps_evicted
        if total < 2 * self._evicted_told:
            return []
        self._evicted_told = total
        return [StepsEvicted(total, retained.evicted, retained.limit)]

    def _advise(self) -> list[Effect]:
        """Say once what a trainer should know that reports no checkpoints."""
        if self._advised or not (advice := self.retained.advice()):
            return []
        self._advised = True
        return [Advised(advice)]

    def begun(self) -> list[Effect]:
        """A new process group asks for its first step; returns what its trainer should know."""
        if self._ledger.generation.resumed is not None or not len(self.retained):
            return []
        oldest = self.retained.oldest(self._ledger.steps.committed)
        return [
            Advised(
                f"DP ranks begin without having loaded a checkpoint, after step "
                f"{self._ledger.steps.committed}: the samples of the {len(self.retained)} steps "
                f"after step {oldest}, which no saved checkpoint covers, are not given again. If "
                "the weights do not have them, load the stream's state of their checkpoint "
                "(stream.load_state_dict); of weights that begin anew that is the state taken "
                "before the first step"
            )
        ]

    def check_saved(self, through: int) -> None:
        """Raise ProtocolError for a checkpoint after a step that was never planned."""
        if through >= self._ledger.steps.next_step:
            raise ProtocolError(f"a checkpoint after step {through}, which was never planned")

    def saved(self, through: int) -> None:
        """A checkpoint that covers the steps up to `through` is durable.

        Raises ProtocolError for a step that was never planned.
        """
        self.check_saved(through)
        if through <= self.retained.saved:
            return
        for step in self.retained.release(through):
            self._objects.done(step.entries())
        self._advised = self._advised and bool(self.retained.advice())
        self._note(CheckpointSaved(through))

    def check_position(self, position: CheckpointPosition, run_id: str) -> None:
        """Raise CheckpointRefused for a position that this generation cannot go on from.

        Once it has, only the run is asked for: the steps that were retained then may be gone.
        """
        steps, resumed = self._ledger.steps, self._ledger.generation.resumed
        if resumed is None:
            planned, announced = steps.next_step - 1, steps.announced
            self.retained.check(position, run_id, steps.committed, planned, announced)
        else:
            self.retained.check_run(position, run_id, steps.committed)

    def resume(
        self, position: CheckpointPosition, run_id: str, now: float
    ) -> tuple[list[Effect], Rewound]:
        """Go to where a checkpoint was taken; returns the steps that are committed with that.

        Raises CheckpointRefused for one that this run cannot go on from; nothing has changed then.
        """
        self.check_position(position, run_id)
        steps, after, committed = self._ledger.steps, position.step, self._ledger.steps.committed
        done = self.committed(steps.commit(after), now)
        rewound = self.retained.take_after(after)
        self._ledger.resume(after, rewound)
        self._note(Resumed(after))
        samples = sum(step.num_samples for step in rewound)
        missing = max(0, committed - after) - len(rewound)
        return done, self._count(Rewound(after, len(rewound), samples, missing))

    def _count(self, rewound: Rewound) -> Rewound:
        self._totals.steps_rewound += rewound.steps
        self._totals.samples_rewound += rewound.samples
        self._totals.steps_not_rewound += rewound.missing
        return rewound


def _restored(step: RememberedStep, state: StepState) -> OpenStep:
    return OpenStep(
        step.number, step.micro_batches, step.digest, step.planned_at, state,
        attempt=step.attempt, usual_loss=step.usual_loss,
    )  # fmt: skip
