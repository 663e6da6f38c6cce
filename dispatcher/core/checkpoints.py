"""Trainers' checkpoints: what becomes of committed steps, and how the ledger goes back to one.

A checkpoint's position is the last step that its trainer had said it committed. A generation that
loads one goes on after that step, once, however often its ranks repeat it: steps up to there that
are open are committed (the trainer was killed before every rank's word was heard), retained steps
after it are open again. Both are facts before any rank is given a step.
"""

from collections.abc import Callable

from dispatcher.core.events import WentBack
from dispatcher.core.facts import (
    CheckpointSaved,
    Committed,
    Fact,
    Remembered,
    RememberedStep,
    Resumed,
)
from dispatcher.core.ledger import StepLedger
from dispatcher.core.retained import Position, RetainedSteps
from dispatcher.core.step import OpenStep, StepState
from dispatcher.core.totals import Totals
from dispatcher.errors import ProtocolError


class Checkpoints:
    """Moves steps between the ledger and what is retained, and counts them.

    retain: keep committed steps until a checkpoint that covers them is saved.
    """

    def __init__(
        self, ledger: StepLedger, totals: Totals, note: Callable[[Fact], None], *, retain: bool
    ) -> None:
        self.retained = RetainedSteps(keep=retain)
        self._ledger, self._totals, self._note = ledger, totals, note

    def restore(self, memory: Remembered) -> None:
        """Start from what an earlier process left open and retained."""
        steps = [_restored(step, StepState.PLANNED) for step in memory.steps]
        rewound = any(step.rewound for step in memory.steps)
        self._ledger.restore(
            [] if rewound else steps,
            memory.next_step,
            memory.generation,
            memory.dp_size,
            again=steps if rewound else [],
            resumed=memory.resumed,
        )
        kept = [_restored(step, StepState.COMMITTED) for step in memory.retained]
        self.retained.restore(kept, memory.saved)
        if kept and not self.retained.keep:
            self.saved(kept[-1].number)

    def committed(self, step: OpenStep) -> None:
        """A step is committed."""
        self._totals.steps_committed += 1
        self._totals.samples_committed += step.num_samples
        self._note(Committed(step.number, self.retained.committed(step)))

    def saved(self, through: int) -> None:
        """A checkpoint that covers the steps up to `through` is durable.

        Raises ProtocolError for a step that was never planned.
        """
        if through >= self._ledger.next_step:
            raise ProtocolError(f"a checkpoint after step {through}, which was never planned")
        if self.retained.release(through):
            self._note(CheckpointSaved(through))

    def resume(self, position: Position, run_id: str) -> tuple[list[OpenStep], WentBack]:
        """Go to where a checkpoint was taken; returns the steps that are committed with that.

        Raises CheckpointRefused for one that this run cannot go on from; nothing has changed then.
        """
        ledger, after, committed = self._ledger, position.step, self._ledger.committed
        self.retained.check(position, run_id, committed, ledger.next_step - 1)
        done = ledger.pass_over(after)
        for step in done:
            self.committed(step)
        back = self.retained.take_after(after)
        ledger.go_back(after, back)
        self._note(Resumed(after))
        missing = max(0, committed - after) - len(back)
        return done, self._count(WentBack(after, len(back), _samples(back), missing))

    def _count(self, went: WentBack) -> WentBack:
        self._totals.steps_rewound += went.steps
        self._totals.samples_rewound += went.samples
        self._totals.steps_not_rewound += went.missing
        return went


def _samples(steps: list[OpenStep]) -> int:
    return sum(step.num_samples for step in steps)


def _restored(step: RememberedStep, state: StepState) -> OpenStep:
    return OpenStep(step.number, step.micro_batches, step.digest, step.planned_at, state)
