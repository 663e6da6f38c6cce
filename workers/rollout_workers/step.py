"""`Step`: one optimizer step as a training loop has it."""

from collections.abc import Iterator

from rollout_dispatcher.errors import StepContractError
from rollout_workers.micro_batch.collate import CollateConfig, collate
from rollout_workers.micro_batch.delivery import Coming, look_ahead
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.rank.client import RankStep


class Step:
    """One optimizer step: iterate its micro-batches, once or several times, then `commit()`.

    Every iteration yields the same micro-batches in the same packing, in memory of their own: what
    was written into those of an earlier iteration is not in them.

    epochs: how often it is iterated, the last time in the received memory itself; None: any number
        of times.
    """

    def __init__(self, step: RankStep, config: CollateConfig, epochs: int | None = None) -> None:
        self._step, self._config, self._epochs = step, config, epochs
        #: How often each micro-batch was handed out, in order; those never reached are missing.
        self._handed_out: list[int] = []

    def __len__(self) -> int:
        """Micro-batches of this rank, and of every other; known before the first arrives."""
        return len(self._step)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield micro-batches as they arrive.

        Raises StepContractError once the step is committed or was iterated as often as said, or
        what ended the stream for good.
        """
        for index, coming in enumerate(look_ahead(len(self), self._may_look_ahead, self._send)):
            self._handed_out[index : index + 1] = [self._times(index) + 1]
            yield coming.arrived()

    def _may_look_ahead(self, index: int) -> bool:
        if not self._config.delivery.ahead or self._times(index) == self._epochs:
            return False
        return self._step.has(index)

    def _times(self, index: int) -> int:
        return self._handed_out[index] if index < len(self._handed_out) else 0

    def _send(self, index: int) -> Coming:
        """Wait for a micro-batch, and send it to where it is computed."""
        item, before = self._step.micro_batch(index), self._times(index)
        if before == self._epochs:
            raise StepContractError(
                f"micro-batch {index} of step {self.number} was handed out as often as the stream "
                f"was made for, with epochs={self._epochs}, and its memory is the trainer's now; "
                "make the stream with the number of times that steps are iterated"
            )
        give_away = self._epochs is not None and before + 1 == self._epochs
        batch = collate(item, self._step.header, self._config, give_away=give_away)
        return self._config.delivery.send(batch)

    def commit(self, *, partial: bool = False) -> None:
        """Say that this step's optimizer step is done; queues the message and returns.

        partial: commit although not all micro-batches were handed out; the samples in the others
            count as trained nevertheless, and never come again.

        Raises StepContractError out of order, naming the step that is due, and where micro-batches
        are left that no iteration has reached yet.
        """
        if not (self.handed_out or partial):
            reached = len(self._handed_out)
            raise StepContractError(
                f"step {self.number} is to be committed, and {reached} of its {len(self)} "
                "micro-batches were handed out: the others would count as trained. Iterate the "
                "whole step before commit(); to leave them out on purpose, on every rank, call "
                "commit(partial=True)"
            )
        self._step.commit()

    @property
    def handed_out(self) -> bool:
        """Whether some iteration has reached every micro-batch."""
        return len(self._handed_out) == len(self)

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
