"""Trainers' checkpoints: what becomes of committed steps, and how the ledger resumes from one.

A checkpoint's position is the last step that its trainer had said it committed. A generation that
loads one *resumes* after that step, once, however often its ranks repeat it: steps up to there that
are open are committed (the trainer was killed before every rank's word was heard), retained steps
after it are *rewound*, which means open again. Both are facts before any rank is given a step.
Retained steps that there is no room for are evicted, the oldest first: counted, told and a fact.

Retained steps: what is committed, and may have to be trained again.

A trainer that loads a checkpoint takes its weights back to the step after which it was taken, and
the ledger has to go back with it. With a journal committed steps stay here, identical, until a
checkpoint at or after them is reported saved, or until there is no room for them: then the oldest
are evicted. With `--retain commit` none does. Invariant: the retained steps are the last ones
committed, without a gap, up to the newest; so what a run can go back to is one step number,
`oldest`. Payloads are not held: the journal has them.
"""

import sys
from collections.abc import Iterable
from itertools import takewhile
from typing import TYPE_CHECKING

from rollout_dispatcher.core.effects import Advised, Effect, Rewound, StepCommitted, StepsEvicted
from rollout_dispatcher.core.facts import (
    CheckpointSaved,
    Committed,
    Remembered,
    RememberedStep,
    Resumed,
    RetainedEvicted,
)
from rollout_dispatcher.core.steps.rank_state import CheckpointPosition
from rollout_dispatcher.core.steps.step import OpenStep, StepState
from rollout_dispatcher.errors import CheckpointRefused, ProtocolError

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

#: Retained samples; each takes a kilobyte of memory for what is no payload.
MAX_RETAINED_SAMPLES = 1_000_000
#: Committed steps after which a trainer that has reported no checkpoint as saved is told so.
ADVISED_STEPS = 100


class RetainedSteps:
    """Committed steps that no saved checkpoint covers; `keep=False` retains none.

    saved: the last step that a saved checkpoint covers, as reported. evicted: the last one that had
    to go before that. limit: of `nbytes`.
    samples, nbytes: of the retained steps; the bytes are those of their payloads, on disk.
    """

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.saved = self.evicted = -1
        self.limit = sys.maxsize
        self.samples = self.nbytes = 0
        self._steps: dict[int, OpenStep] = {}  # in order

    def __len__(self) -> int:
        return len(self._steps)

    def restore(self, steps: Iterable[OpenStep], saved: int, evicted: int) -> None:
        """Start from what an earlier process retained."""
        self.saved, self.evicted = saved, evicted
        for step in steps:
            self._add(step)

    def committed(self, step: OpenStep) -> bool:
        """A step is committed; returns whether it is retained."""
        retained = self.keep and step.number > self.saved
        if retained:
            self._add(step.in_journal())
        return retained

    def release(self, through: int) -> list[OpenStep]:
        """A checkpoint that covers the steps up to there is saved; returns what it lets go of."""
        self.saved = through
        covered = list(takewhile(lambda number: number <= through, self._steps))
        return [self._remove(number) for number in covered]

    def evict(self) -> list[OpenStep]:
        """Let go of the oldest steps for which there is no room; returns them."""
        gone = []
        while self._steps and (
            not self.keep or self.nbytes > self.limit or self.samples > MAX_RETAINED_SAMPLES
        ):
            gone.append(self._remove(next(iter(self._steps))))
            self.evicted = gone[-1].number
        return gone

    @property
    def is_half_full(self) -> bool:
        """Whether half of what may be retained is."""
        return 2 * self.nbytes >= self.limit or 2 * self.samples >= MAX_RETAINED_SAMPLES

    def advice(self) -> str:
        """What a trainer should know that reports no checkpoints as saved; empty if nothing."""
        never = self.saved < 0 and len(self) >= ADVISED_STEPS
        if not self._steps or not (never or self.is_half_full):
            return ""
        since = f"since the one after step {self.saved}" if self.saved >= 0 else "so far"
        return (
            f"no checkpoint was reported as saved {since}, so {len(self)} committed steps with "
            f"{self.samples} samples ({self.nbytes / 2**20:.1f} MiB) are kept to be given again; "
            f"beyond {self.limit / 2**20:.1f} MiB (--retain-bytes) or {MAX_RETAINED_SAMPLES} "
            "samples the oldest go, and an older checkpoint cannot be resumed from then: call "
            "stream.checkpoint_saved(state) once a checkpoint is on the disk, or start the "
            "dispatcher with --retain commit if none is ever loaded"
        )

    def take_after(self, number: int) -> list[OpenStep]:
        """Give up the steps after this one, oldest first: they are committed no more."""
        after = list(takewhile(lambda at: at > number, reversed(self._steps)))
        return [self._remove(at) for at in reversed(after)]

    def oldest(self, committed: int) -> int:
        """The oldest step that the run can go back to, if `committed` is the last one committed."""
        return next(iter(self._steps), committed + 1) - 1

    def check(
        self,
        position: CheckpointPosition,
        run_id: str,
        committed: int,
        planned: int,
        announced: int,
    ) -> None:
        """Raise CheckpointRefused for a position that this run cannot go on from.

        committed, planned, announced: the last step that is, or ever was announced; -1 for none.
        """
        self.check_run(position, run_id, committed)
        if position.step > announced:
            raise CheckpointRefused(
                f"the checkpoint was taken after step {position.step}, and the last step that this "
                f"dispatcher knows of run {run_id} is {planned}: its journal has lost what came "
                "after that, or is an older copy; start it with the journal that has those steps"
            )
        if position.step > planned:  # the run went back, and lost samples of what it gave again
            raise CheckpointRefused(
                f"the checkpoint was taken after step {position.step}, which was withdrawn since, "
                f"as its samples could not be got again, and the last step of run {run_id} is "
                f"{planned} now: load an older checkpoint, or do not load the stream's part of "
                "this one to go on with what there is here"
            )
        oldest = self.oldest(committed)
        if self.keep and position.step < oldest and not position.allow_lost_steps:
            raise CheckpointRefused(
                f"the checkpoint was taken after step {position.step}, and the steps up to "
                f"{oldest} that were trained after it cannot be given again, "
                f"{oldest - position.step} in all: {self._why_gone(oldest)}. The oldest that run "
                f"{run_id} can go back to is one after step {oldest}; to go on from this one "
                "without their samples: load_state_dict(state, allow_lost_steps=True)"
            )

    def _why_gone(self, oldest: int) -> str:
        if oldest <= self.evicted:
            return (
                f"they were let go of when there was no room for more than {self.limit} bytes or "
                f"{MAX_RETAINED_SAMPLES} samples of committed steps; a larger --retain-bytes, or "
                "checkpoint_saved for each checkpoint, would have kept them"
            )
        if oldest <= self.saved:
            return "they were released for good since a later checkpoint was reported saved"
        return "they were committed under --retain commit; without it they would have been kept"

    def check_run(self, position: CheckpointPosition, run_id: str, committed: int) -> None:
        """Raise CheckpointRefused for a position of another run."""
        if position.run_id != run_id:
            raise CheckpointRefused(
                f"the checkpoint is of run {position.run_id}, after its step {position.step}; this "
                f"dispatcher serves run {run_id}, whose last committed step is {committed}: start "
                "it with the --journal-dir of the checkpoint's run, or do not load the stream's "
                "part of the checkpoint to go on with what there is here"
            )

    def _add(self, step: OpenStep) -> None:
        self._steps[step.number] = step
        self.samples += step.num_samples
        self.nbytes += step.nbytes

    def _remove(self, number: int) -> OpenStep:
        step = self._steps.pop(number)
        self.samples -= step.num_samples
        self.nbytes -= step.nbytes
        return step


class Checkpoints:
    """Moves steps between the ledger and what is retained, and counts them.

    retain: keep committed steps until a checkpoint that covers them is saved.
    """

    def __init__(self, parts: "Parts", *, retain: bool) -> None:
        self.retained = RetainedSteps(keep=retain)
        self._ledger, self._totals, self._note = parts.ledger, parts.totals, parts.note
        self._objects = parts.references.objects
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
