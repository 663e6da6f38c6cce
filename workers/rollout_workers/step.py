"""`Step`: one optimizer step as a training loop has it."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from rollout_dispatcher.errors import StepContractError
from rollout_workers.micro_batch.collate import CollateConfig, collate
from rollout_workers.micro_batch.delivery import Coming, look_ahead
from rollout_workers.micro_batch.loss import loss_scales
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.rank.client import RankStep
from rollout_workers.timing.timing import Timing


class Step:
    """One optimizer step: iterate its micro-batches, once or several times, then `commit()`.

    Every iteration yields the same micro-batches in the same packing, in memory of their own: they
    have the received values, also where a trainer wrote into those of an earlier iteration.

    epochs: how often it is iterated, the last time in the received memory itself; None: any number
        of times. timing: measures its times; None: they are not measured.

    Raises ConfigError where its samples have a field of the name of a loss's weights.
    """

    def __init__(
        self,
        step: RankStep,
        config: CollateConfig,
        epochs: int | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._step, self._config, self._epochs = step, config, epochs
        self._scales, self._timing = loss_scales(step.header, config.loss), timing
        self._timer = None if timing is None else timing.begin(self.number, len(self))
        #: How often each micro-batch was handed out.
        self._times = [0] * len(self)

    def __len__(self) -> int:
        """Micro-batches of this rank, and of every other; known before the first arrives."""
        return len(self._step)

    def __repr__(self) -> str:
        """For a print or a notebook; also once it is committed."""
        return (
            f"Step(number={self.number}, num_samples={self.num_samples}, tokens={self.tokens}, "
            f"micro_batches={len(self)})"
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield micro-batches as they arrive.

        Raises StepContractError once the step is committed or was iterated `epochs` times, and the
        error that ended the stream for good.
        """
        sent: Iterator[Coming] = map(self._fetch_to_device, range(len(self)))
        if self._config.delivery.ahead:
            sent = look_ahead(len(self), self._may_look_ahead, self._fetch_to_device)
        for index, coming in enumerate(sent):
            self._times[index] += 1
            micro_batch = coming()
            if (timer := self._timer) is not None:
                timer.hand_out(index)
            try:
                yield micro_batch
            finally:  # also where the loop is left
                if timer is not None:
                    timer.asked(index)

    def _may_look_ahead(self, index: int) -> bool:
        return self._times[index] != self._epochs and self._step.has(index)

    def _fetch_to_device(self, index: int) -> Coming:
        """Wait for a micro-batch, collate it, and copy it to the device."""
        item, before = self._step.micro_batch(index), self._times[index]
        if before == self._epochs:
            raise StepContractError(
                f"micro-batch {index} of step {self.number} was handed out as often as the stream "
                f"was made for, with epochs={self._epochs}, and its memory is the trainer's now; "
                "make the stream with the number of times that steps are iterated"
            )
        give_away = self._epochs is not None and before + 1 == self._epochs
        batch = collate(
            item, self._step.header, self._config, scales=self._scales, give_away=give_away
        )
        return self._config.delivery.send(batch)

    def scale_for(self, denominator: float | Tensor) -> float:
        """The factor of a loss that is averaged over `denominator`, a total over all DP ranks.

        For masks that the trainer makes during the step, such as of tokens of high entropy: one
        pass makes them and their total, which the DP ranks add up, and the next trains.

            masks = [make_mask(model, micro_batch) for micro_batch in step]  # 0 on fillers
            total = sum(mask.sum() for mask in masks)
            torch.distributed.all_reduce(total, group=dp_group)
            for micro_batch, mask in zip(step, masks, strict=True):
                loss = (token_losses(model, micro_batch) * mask).sum() * step.scale_for(total)

        As `loss_scale` is for the stream's losses: it includes the ranks whose gradients are
        averaged, and what the trainer divides by. 0 for a denominator of 0.
        """
        return self._config.loss.scale(float(denominator), len(self))

    def commit(self, *, partial: bool = False) -> None:
        """Say that this step's optimizer step is done; queues the message and returns.

        partial: commit although not all micro-batches were handed out; the samples in the others
            count as trained nevertheless, and never come again.

        Raises StepContractError out of order, naming the step that is due, and where micro-batches
        are left that no iteration has reached yet.
        """
        if not (self.handed_out or partial):
            reached = sum(map(bool, self._times))
            raise StepContractError(
                f"step {self.number} is to be committed, and {reached} of its {len(self)} "
                "micro-batches were handed out: the others would count as trained. Iterate the "
                "whole step before commit(); to leave them out on purpose, on every rank, call "
                "commit(partial=True)"
            )
        timing, timer, now = self._timing, self._timer, time.perf_counter()
        self._step.commit(None if timing is None else lambda: timing.finish(timer, now))

    def timer(self, key: str, index: int | None = None) -> AbstractContextManager[None]:
        """What is computed in this block took so long for this pass of the step.

        Without it each micro-batch's time is from when it is handed out until the next is asked
        for, and counts as `update` (as `forward`, if a model that is known here has no backward
        pass in it). Put it round an iteration to name its pass, or inside of one round what counts:

            with step.timer("log-prob"):
                old = [log_probs(model, micro_batch) for micro_batch in step]

        Where micro-batches are asked for all at once, put it round the computing of each, and say
        which it is (`index`, from 0); or round all of it, and nobody knows what each took. Raises
        ConfigError for a key that is no name, and for an index of no micro-batch.
        """
        return nullcontext() if self._timer is None else self._timer.timer(key, index)

    def waiting(self) -> AbstractContextManager[None]:
        """This rank waits in this block for others, in collectives that the trainer calls itself.

        For those in the computing of micro-batches; DDP's and FSDP2's are known.
        """
        return nullcontext() if self._timer is None else self._timer.waiting()

    @property
    def handed_out(self) -> bool:
        """Whether some iteration has reached every micro-batch."""
        return all(self._times)

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
