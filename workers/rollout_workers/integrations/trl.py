"""TRL's `AsyncGRPOTrainer`, fed by a stream in place of its own queue on rank 0.

    class StreamGRPOTrainer(GRPOSteps, AsyncGRPOTrainer): ...

    trainer = StreamGRPOTrainer(...)                  # arguments as before
    trainer.rollouts = steps_for_grpo(stream)

The trainer keeps its loss, its metrics and its weight sync. Of its data path one part stays, the
packing of samples with a common prefix (`TreeRow`). The queue, the batchers and the collator on
rank 0, from which `accelerate` broadcasts every row to all ranks, are left out: each rank has its
own micro-batches, balanced over a window and over the whole step, stale samples dropped.

Samples have the fields `input_ids`, `loss_mask`, `logprobs` and `advantage` (a number), and groups.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from trl.experimental.async_grpo import packing

from rollout_workers.dataset import StreamDataset
from rollout_workers.integrations.hugging_face import WholeSteps, refuse_accumulation
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.step import Step
from rollout_workers.stream import MicroBatchStream


def steps_for_grpo(stream: MicroBatchStream) -> StreamDataset:
    """The trainer's `rollouts`: an item a step, a row for each of its micro-batches."""
    return StreamDataset(stream, lambda step: [[row(each, step) for each in step]])


class GRPOSteps(WholeSteps):
    """Mixin in front of `AsyncGRPOTrainer` that makes it train on whole steps.

    rollouts: set before `train()`, as `steps_for_grpo` makes it.
    """

    rollouts: StreamDataset
    current_gradient_accumulation_steps: int
    model_version: int

    def get_train_dataloader(self) -> StreamDataset:
        """The steps themselves; the trainer's own dataset is asked for its waiting time only."""
        refuse_accumulation(self.args)
        self._rollout_dataset = SimpleNamespace(wait_s=0.0)
        return self.rollouts

    def _steps(self) -> StreamDataset:
        return self.rollouts

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """One step; reports the policy version that trains it to the dispatcher."""
        stream = self.rollouts.stream
        stream.set_policy_version(self.model_version)
        before = stream.statistics().step_wait_s
        found = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._rollout_dataset.wait_s += stream.statistics().step_wait_s - before
        return found

    def _items_in(self, micro_batches: Any, device: Any) -> None:
        """None: rows have the divisor of their loss."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: None) -> Tensor:
        """Accumulate over a step's rows."""
        self.current_gradient_accumulation_steps = len(inputs)
        return super().training_step(model, inputs, num_items_in_batch)


def row(micro_batch: MicroBatch, step: Step) -> dict[str, Tensor]:
    """A row as TRL's collator makes it for one rank; its counts are shares of the step's."""
    tree = packing.TreeRow()
    for sample in samples_of(micro_batch):
        tree.add(sample)
    found = {name: tensor[None] for name, tensor in tree.pack().items()}
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    found["global_n_tokens"] = torch.tensor([step.loss_tokens / len(step)])
    found["global_n_forward_tokens"] = torch.tensor([step.tokens / len(step)])
    found["mean_seq_len"] = torch.tensor([step.tokens / step.num_samples])
    return found


def samples_of(micro_batch: MicroBatch) -> Iterator[dict[str, Any]]:
    """Samples as TRL has them. A filler is one of no advantage: each row needs a loss term."""
    if micro_batch.is_filler:
        ids = micro_batch.input_ids.repeat(2)
        nothing = {"old_log_probs": torch.zeros(2), "advantage": 0.0, "group_id": None}
        yield {"input_ids": ids, "completion_mask": torch.ones(2), **nothing}
        return
    ours = ("input_ids", "loss_mask", "logprobs")
    lengths = micro_batch.lengths
    parts = (micro_batch[name].split(lengths) for name in ours)  # type: ignore[no-untyped-call]
    theirs = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
    for values in zip(*parts, micro_batch.advantage.tolist(), micro_batch.group_ids, strict=True):
        yield dict(zip(theirs, values, strict=True))
