"""Retained steps: what is committed, and may have to be trained again.

A trainer that loads a checkpoint takes its weights back to the step after which it was taken, and
the ledger has to go back with it. With `--retain checkpoint` committed steps stay here, identical,
until a checkpoint at or after them is reported saved; with `--retain commit` none does. Invariant:
the retained steps are the last ones committed, without a gap, up to the newest; so what a run can
go back to is one step number, `oldest`. Payloads are not held: the journal has them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.errors import CheckpointRefused


@dataclass(frozen=True, slots=True)
class CheckpointPosition:
    """Where a checkpoint was taken: after `step` (-1: before the first) of this run."""

    run_id: str
    step: int


class RetainedSteps:
    """Committed steps that no saved checkpoint covers; `keep=False` retains none.

    saved: the last step that a saved checkpoint covers, as reported.
    samples, nbytes: of the retained steps; the bytes are those of their payloads, on disk.
    """

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.saved = -1
        self.samples = self.nbytes = 0
        self._steps: dict[int, OpenStep] = {}  # in order

    def __len__(self) -> int:
        return len(self._steps)

    def restore(self, steps: Iterable[OpenStep], saved: int) -> None:
        """Start from what an earlier process retained."""
        self.saved = saved
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

    def take_after(self, number: int) -> list[OpenStep]:
        """Give up the steps after this one, oldest first: they are committed no more."""
        after = list(takewhile(lambda at: at > number, reversed(self._steps)))
        return [self._remove(at) for at in reversed(after)]

    def oldest(self, committed: int) -> int:
        """The oldest step that the run can go back to, if `committed` is the last one committed."""
        return next(iter(self._steps), committed + 1) - 1

    def check(
        self, position: CheckpointPosition, run_id: str, committed: int, planned: int
    ) -> None:
        """Raise CheckpointRefused for a position that this run cannot go on from.

        committed, planned: the last step that is, -1 for none.
        """
        self.check_run(position, run_id, committed)
        if position.step > planned:
            raise CheckpointRefused(
                f"the checkpoint was taken after step {position.step}, and the last step that this "
                f"dispatcher knows of run {run_id} is {planned}: its journal has lost what came "
                "after that, or is an older copy; start it with the journal that has those steps"
            )
        oldest = self.oldest(committed)
        if self.keep and position.step < oldest:
            raise CheckpointRefused(
                f"the checkpoint was taken after step {position.step}, and the steps up to "
                f"{oldest} are released for good since a later checkpoint was reported saved; the "
                f"oldest that run {run_id} can go back to is one after step {oldest}"
            )

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
