"""Trainers' checkpoints: retains committed steps for a rewind, and resumes the ledger from one.

A checkpoint's position is the last step that its trainer had committed. A generation that loads one
*resumes* after that step, once: open steps up to it are committed (the trainer died before every
rank's commit arrived), and retained steps after it are *rewound*, that is open again. Both are
facts before any rank receives a step.

With a journal, committed steps are *retained*, identical, until a checkpoint at or after them is
reported saved; if they exceed the room, the oldest are evicted (counted, reported and a fact). With
`retain=False` none is retained. Invariant: the retained steps are the last committed ones without a
gap, so a run can go back to any step from `oldest_resume_point` on. Their payloads are in the
journal only.
"""

import sys
from itertools import takewhile
from typing import TYPE_CHECKING

from rollout_dispatcher.core.effects import Advised, Effect, Rewound, StepCommitted, StepsEvicted
from rollout_dispatcher.core.facts import (
    CheckpointSaved,
    Committed,
    RecoveredState,
    Resumed,
    RetainedEvicted,
)
from rollout_dispatcher.core.steps.rank_state import CheckpointPosition
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.errors import CheckpointRefused, ProtocolError

if TYPE_CHECKING:
    from rollout_dispatcher.core.parts import Parts

#: Retained samples; each takes a kilobyte of memory without its payload.
MAX_RETAINED_SAMPLES = 1_000_000
#: Committed steps after which a trainer without a saved checkpoint is advised.
ADVISED_STEPS = 100


class Checkpoints:
    """Retains committed steps, and moves them back into the ledger.

    retain: keep committed steps until a saved checkpoint covers them.
    saved: the last step that a saved checkpoint covers; evicted: the last one evicted before that.
    samples, nbytes: of the retained steps; bytes of payload, on disk. limit: of `nbytes`.
    """

    def __init__(self, parts: "Parts", *, retain: bool) -> None:
        self._keep, self.saved, self.evicted = retain, -1, -1
        self.limit = sys.maxsize
        self.samples = self.nbytes = 0
        self._steps: dict[int, OpenStep] = {}  # retained, in order
        self._ledger, self._totals, self._append = parts.ledger, parts.totals, parts.append_fact
        self._objects = parts.references.objects
        self._advised, self._evicted_reported = False, 0

    @property
    def num_retained(self) -> int:
        """Committed steps that no saved checkpoint covers."""
        return len(self._steps)

    def restore(self, memory: RecoveredState) -> None:
        """Start from the open and retained steps of an earlier process."""
        room = 0 if memory.rewound else self._ledger.max_open_steps
        self._ledger.steps.restore(memory.steps, memory.next_step, memory.withdrawn, room=room)
        self._ledger.generation.restore(memory.generation, memory.dp_size, memory.resumed)
        self.saved, self.evicted = memory.saved, memory.evicted
        for step in memory.retained:
            self._add(step)
        self._evict()

    def committed(self, steps: list[OpenStep], now: float) -> list[Effect]:
        """Count committed steps, and retain or release them; returns reports."""
        for step in steps:
            self._totals.steps_committed += 1
            self._totals.samples_committed += step.num_samples
            retained = self._keep and step.number > self.saved
            self._append(Committed(step.number, retained))
            if retained:
                self._add(step.in_journal())
            else:
                self._objects.done(step.entries())
        done = [
            StepCommitted(step.number, step.num_samples, now - step.planned_at) for step in steps
        ]
        return [*done, *self._evict(), *self._advise()]

    def retain_at_most(self, nbytes: int) -> list[Effect]:
        """Limit the payload bytes of retained steps."""
        self.limit = nbytes
        return [*self._evict(), *self._advise()]

    def _evict(self) -> list[Effect]:
        """Evict the oldest steps above the limits."""
        gone = 0
        while self._steps and (
            not self._keep or self.nbytes > self.limit or self.samples > MAX_RETAINED_SAMPLES
        ):
            step = self._remove(next(iter(self._steps)))
            self.evicted, gone = step.number, gone + 1
            self._objects.done(step.entries())
        if not gone:
            return []
        self._totals.steps_evicted += gone
        self._append(RetainedEvicted(self.evicted))
        total = self._totals.steps_evicted
        if total < 2 * self._evicted_reported:
            return []
        self._evicted_reported = total
        return [StepsEvicted(total, self.evicted, self.limit)]

    def _advise(self) -> list[Effect]:
        """Report `advice` once."""
        if self._advised or not (advice := self.advice()):
            return []
        self._advised = True
        return [Advised(advice)]

    def advice(self) -> str:
        """Advice for a trainer that reports no saved checkpoints; empty for none."""
        never = self.saved < 0 and len(self._steps) >= ADVISED_STEPS
        half_full = 2 * self.nbytes >= self.limit or 2 * self.samples >= MAX_RETAINED_SAMPLES
        if not self._steps or not (never or half_full):
            return ""
        since = f"since the one after step {self.saved}" if self.saved >= 0 else "so far"
        return (
            f"no checkpoint was reported as saved {since}, so {len(self._steps)} committed steps "
            f"with {self.samples} samples ({self.nbytes / 2**20:.1f} MiB) are kept to be given "
            f"again; beyond {self.limit / 2**20:.1f} MiB (--set retain-bytes) or "
            f"{MAX_RETAINED_SAMPLES} samples the oldest go, and an older checkpoint cannot be "
            "resumed from then: call stream.checkpoint_saved(state) once a checkpoint is on the "
            "disk, or start the dispatcher with --sample-retention commit if none is ever loaded"
        )

    def begun(self) -> list[Effect]:
        """A new process group asks for its first step; returns advice for its trainer."""
        if self._ledger.generation.resumed is not None or not self._steps:
            return []
        oldest = self.oldest_resume_point
        return [
            Advised(
                f"DP ranks begin without having loaded a checkpoint, after step "
                f"{self._ledger.steps.committed}: the samples of the {len(self._steps)} steps "
                f"after step {oldest}, which no saved checkpoint covers, are not given again. If "
                "the weights do not have them, load the stream's state of their checkpoint "
                "(stream.load_state_dict); of weights that begin anew that is the state taken "
                "before the first step"
            )
        ]

    def check_saved(self, through: int) -> None:
        """Raise ProtocolError for a checkpoint after a step that was never planned."""
        if through >= self._ledger.steps.next_number:
            raise ProtocolError(f"a checkpoint after step {through}, which was never planned")

    def checkpoint_saved(self, through: int) -> None:
        """A checkpoint that covers the steps up to `through` is durable.

        Raises ProtocolError for a step that was never planned.
        """
        self.check_saved(through)
        if through <= self.saved:
            return
        self.saved = through
        for number in list(takewhile(lambda number: number <= through, self._steps)):
            self._objects.done(self._remove(number).entries())
        self._advised = self._advised and bool(self.advice())
        self._append(CheckpointSaved(through))

    def check_position(self, position: CheckpointPosition, run_id: str) -> None:
        """Raise CheckpointRefused for a position that this generation cannot resume from.

        Once it has resumed, only the run is checked: steps retained then may be released.
        """
        self._check_run(position, run_id)
        if self._ledger.generation.resumed is not None:
            return
        steps = self._ledger.steps
        planned, announced = steps.next_number - 1, steps.last_announced
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
        oldest = self.oldest_resume_point
        if self._keep and position.step < oldest and not position.allow_lost_steps:
            raise CheckpointRefused(
                f"the checkpoint was taken after step {position.step}, and the steps up to "
                f"{oldest} that were trained after it cannot be delivered again, "
                f"{oldest - position.step} in all: {self._why_gone(oldest)}. The oldest that run "
                f"{run_id} can go back to is one after step {oldest}; to go on from this one "
                "without their samples: load_state_dict(state, allow_lost_steps=True)"
            )

    @property
    def oldest_resume_point(self) -> int:
        """The earliest step to resume after: all later ones are retained."""
        return next(iter(self._steps), self._ledger.steps.committed + 1) - 1

    def _why_gone(self, oldest: int) -> str:
        if oldest <= self.evicted:
            return (
                f"they were let go of when there was no room for more than {self.limit} bytes or "
                f"{MAX_RETAINED_SAMPLES} samples of committed steps; a larger --set retain-bytes, "
                "or checkpoint_saved for each checkpoint, would have kept them"
            )
        if oldest <= self.saved:
            return "they were released for good since a later checkpoint was reported saved"
        return (
            "they were committed under --sample-retention commit; without it they would have been "
            "kept"
        )

    def _check_run(self, position: CheckpointPosition, run_id: str) -> None:
        """Raise CheckpointRefused for a position of another run."""
        if position.run_id != run_id:
            raise CheckpointRefused(
                f"the checkpoint is of run {position.run_id}, after its step {position.step}; this "
                f"dispatcher serves run {run_id}, whose last committed step is "
                f"{self._ledger.steps.committed}: start it with the --journal-dir of the "
                "checkpoint's run, or go on with what there is here: "
                "load_state_dict(state, strict=False)"
            )

    def resume(
        self, position: CheckpointPosition, run_id: str, now: float
    ) -> tuple[list[Effect], Rewound]:
        """Resume after a checkpoint's step; returns reports of steps that this commits.

        Raises CheckpointRefused for one that this run cannot resume from, and changes nothing then.
        """
        self.check_position(position, run_id)
        steps, after, committed = self._ledger.steps, position.step, self._ledger.steps.committed
        done = self.committed(steps.commit(after), now)
        rewound = self._remove_after(after)
        self._ledger.resume(after, rewound)
        self._append(Resumed(after))
        samples = sum(step.num_samples for step in rewound)
        missing = max(0, committed - after) - len(rewound)
        self._totals.steps_rewound += len(rewound)
        self._totals.samples_rewound += samples
        self._totals.steps_not_rewound += missing
        return done, Rewound(after, len(rewound), samples, missing)

    def _remove_after(self, number: int) -> list[OpenStep]:
        """Remove the retained steps after this one, and return them, the oldest first."""
        after = list(takewhile(lambda at: at > number, reversed(self._steps)))
        return [self._remove(at) for at in reversed(after)]

    def _add(self, step: OpenStep) -> None:
        self._steps[step.number] = step
        self.samples += step.num_samples
        self.nbytes += step.nbytes

    def _remove(self, number: int) -> OpenStep:
        step = self._steps.pop(number)
        self.samples -= step.num_samples
        self.nbytes -= step.nbytes
        return step
