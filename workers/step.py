"""`Step`: one optimizer step as a training loop has it."""

from collections.abc import Iterator

from dispatcher.errors import StepContractError
from workers.collate import CollateConfig, MicroBatch, collate
from workers.rank_client import RankStep


class Step:
    """One optimizer step: iterate its micro-batches, once or several times, then `commit()`.

    Every iteration yields the same micro-batches in the same packing, in memory of their own: what
    was written into those of an earlier iteration is not in them.
    """

    def __init__(self, step: RankStep, config: CollateConfig) -> None:
        self._step, self._config = step, config
        self._handed_out = 0

    def __len__(self) -> int:
        """Micro-batches of this rank, and of every other; known before the first arrives."""
        return len(self._step)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield micro-batches as they arrive.

        Raises StepContractError once the step is committed, or what ended the stream for good.
        """
        for count, item in enumerate(self._step, 1):
            found = collate(item, self._step.header, self._config)
            self._handed_out = max(self._handed_out, count)
            yield found

    def commit(self, *, partial: bool = False) -> None:
        """Say that this step's optimizer step is done; queues the message and returns.

        partial: commit although not all micro-batches were handed out; the samples in the others
            count as trained nevertheless, and never come again.

        Raises StepContractError out of order, naming the step that is due, and where micro-batches
        are left that no iteration has reached yet.
        """
        if self._handed_out < len(self) and not partial:
            raise StepContractError(
                f"step {self.number} is to be committed, and {self._handed_out} of its {len(self)} "
                "micro-batches were handed out: the others would count as trained. Iterate the "
                "whole step before commit(); to leave them out on purpose, on every rank, call "
                "commit(partial=True)"
            )
        self._step.commit()

    @property
    def number(self) -> int:
        """The step's number: the same on every rank, ascending."""
        return self._step.header.step

    @property
    def digest(self) -> str:
        """Fingerprint of the whole step's plan: the same on every rank."""
        return self._step.header.digest

    @property
    def num_samples(self) -> int:
        """Samples of the whole step over all DP ranks."""
        return self._step.header.num_samples

    @property
    def tokens(self) -> int:
        """Tokens of the whole step over all DP ranks."""
        return self._step.header.tokens

    @property
    def loss_tokens(self) -> int:
        """Tokens that the loss counts, of the whole step over all DP ranks."""
        return self._step.header.loss_tokens

    @property
    def loss_samples(self) -> int:
        """Samples with at least one loss token, of the whole step over all DP ranks."""
        return self._step.header.loss_samples
