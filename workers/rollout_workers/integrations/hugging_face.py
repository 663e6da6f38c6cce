"""Hugging Face `Trainer`: its batch is a step, all micro-batches of it.

    class StreamTrainer(WholeSteps, Trainer): ...

    trainer = StreamTrainer(model, arguments, train_dataset=steps_for_trainer(stream))

The Trainer keeps its own loss, its own normalisation (`num_items_in_batch` over all micro-batches
and ranks), its logging and its checkpoints. There is no `DataLoader`, so `accelerate` shards and
dispatches nothing: the dispatcher has done that. The Trainer accumulates as many micro-batches as
the step has, which differs from step to step. `gradient_accumulation_steps`
stays 1; `max_steps` is a bound, as a stream has no length.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rollout_dispatcher.errors import ConfigError
from rollout_planner.types import UPDATE
from rollout_workers.dataset import StreamDataset
from rollout_workers.stream import MicroBatchStream


def steps_for_trainer(stream: MicroBatchStream) -> StreamDataset:
    """The `train_dataset`: an item a step, its micro-batches by `MicroBatch.as_hf`."""
    return StreamDataset(stream, lambda step: [[each.as_hf() for each in step]])


def refuse_accumulation(args: Any) -> None:
    """Raise ConfigError where the trainer would add steps up."""
    if (count := args.gradient_accumulation_steps) != 1:
        raise ConfigError(
            f"gradient_accumulation_steps is {count}, and {count} steps of the dispatcher would "
            f"become one optimizer step with {count} times the loss; set it to 1, as the "
            "micro-batches of a step are accumulated anyway, and give the dispatcher a "
            "--global-batch-size of all samples of an optimizer step"
        )


class WholeSteps:
    """Mixin in front of `Trainer` that makes it train on whole steps.

    train_dataset: as `steps_for_trainer` makes it, or any other iterable of lists of micro-batches.
    """

    args: Any
    accelerator: Any
    train_dataset: Any

    def get_train_dataloader(self) -> Any:
        """The dataset as it is: each rank has its own micro-batches.

        Raises ConfigError for arguments with which the loss would not be the step's.
        """
        refuse_accumulation(self.args)
        # A single process has it turned off by transformers itself, and needs none.
        if self.args.world_size > 1 and not self.args.average_tokens_across_devices:
            raise ConfigError(
                "average_tokens_across_devices is False, and each rank would divide its loss "
                "by its own tokens instead of the whole step's; set it to True, its default"
            )
        return self.train_dataset

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """One step, and the tokens that its loss is divided by, over all its micro-batches."""
        steps, _ = super().get_batch_samples(epoch_iterator, 1, device)  # type: ignore[misc]
        return steps, self._items_in(steps[0], device) if steps else None

    def _steps(self) -> Any:
        """The iterable of steps."""
        return self.train_dataset

    def _items_in(self, micro_batches: Any, device: Any) -> Any:
        return self._get_num_items_in_batch(micro_batches, device)  # type: ignore[attr-defined]

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Accumulate over a step's micro-batches; gradients are averaged with the last one's."""
        loss = torch.zeros((), device=self.args.device)
        step = getattr(self._steps(), "step", None)
        for index, micro_batch in enumerate(inputs):
            last = index == len(inputs) - 1
            with (
                nullcontext() if step is None else step.timer(UPDATE, index),
                nullcontext() if last else self.accelerator.no_sync(model),
            ):
                loss += super().training_step(  # type: ignore[misc]
                    model, micro_batch, num_items_in_batch
                )
        return loss
