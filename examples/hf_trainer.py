"""Hugging Face `Trainer`, fed by a dispatcher: its batch is a step, all micro-batches of it.

    dispatcher serve --dp-size 2 --dispatch-batch-size 16 --micro-batch-tokens 256
    torchrun --nproc-per-node 2 examples/hf_trainer.py

The Trainer keeps its own loss, its own normalisation (`num_items_in_batch` over all ranks), its
logging and its checkpoints. What it would do itself and the dispatcher has done is left out: no
`DataLoader` is made, so `accelerate` has nothing to shard or to dispatch, and as many micro-batches
are accumulated as the step has, which differs from step to step.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from rollout_workers import MicroBatch, MicroBatchStream, RolloutProducer, RolloutSample, Step

VOCABULARY = 96


# integration: begin
class StreamTrainer(Trainer):
    """A Trainer that is fed by a stream, which takes the place of `train_dataset`."""

    def __init__(self, stream: MicroBatchStream, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stream = stream
        self.step: Step | None = None
        self.add_callback(StreamCallback(self))

    def get_train_dataloader(self) -> MicroBatchStream:
        return self.stream

    def get_batch_samples(
        self, epoch_iterator: Iterator[Step], num_batches: int, device: torch.device
    ) -> tuple[list[list[dict[str, Tensor]]], int]:
        """One batch, which is a step; and the tokens that its loss counts, over all ranks."""
        self.step = next(epoch_iterator, None)
        if self.step is None:
            return [], 0
        return [[for_model(each) for each in self.step]], max(self.step.loss_tokens, 1)

    def training_step(
        self, model: nn.Module, inputs: list[dict[str, Tensor]], num_items_in_batch: int
    ) -> Tensor:
        """Forward and backward over a step, whose last micro-batch synchronises gradients."""
        loss = torch.zeros((), device=self.args.device)
        for left, each in enumerate(inputs, 1 - len(inputs)):
            with self.accelerator.no_sync(model) if left else nullcontext():
                loss += super().training_step(model, each, num_items_in_batch)
        return loss

    def floating_point_ops(self, inputs: list[dict[str, Tensor]]) -> int:
        return sum(map(super().floating_point_ops, inputs))


def for_model(micro_batch: MicroBatch) -> dict[str, Tensor]:
    """One packed row; the model keeps samples apart by their position_ids."""
    ids = micro_batch.input_ids
    labels = ids.masked_fill(micro_batch.loss_weights == 0, -100)
    rows = {"input_ids": ids, "position_ids": micro_batch.position_ids, "labels": labels}
    return {name: row[None] for name, row in rows.items()}


class StreamCallback(TrainerCallback):
    """Commits what was trained on, and puts the stream's state into checkpoints."""

    def __init__(self, trainer: StreamTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.step.commit()

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:  # it is the same on every rank
            stream = self.trainer.stream.state_dict()
            torch.save(stream, f"{args.output_dir}/checkpoint-{state.global_step}/stream.pt")
            self.trainer.stream.checkpoint_saved(stream)


def resume(stream: MicroBatchStream, checkpoint: Path) -> None:
    """Before `trainer.train(resume_from_checkpoint=checkpoint)`, whose data come by themselves."""
    stream.load_state_dict(torch.load(checkpoint / "stream.pt"))


# integration: end


def tiny_model() -> LlamaForCausalLM:
    """The same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def make_trainer(stream: MicroBatchStream, output: Path, max_steps: int) -> StreamTrainer:
    """All there is to say about the data is `max_steps`, as the Trainer wants a bound."""
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=max_steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=2,
        ignore_data_skip=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    return StreamTrainer(stream, model=tiny_model(), args=arguments)


def rollouts(count: int) -> list[RolloutSample]:
    """Samples of heavy-tailed lengths, of which the loss counts what follows the prompt."""
    rng = np.random.default_rng(0)
    found = []
    for index, length in enumerate(rng.lognormal(3, 1, count).clip(4, 200).astype(int)):
        ids = rng.integers(0, VOCABULARY, length)
        fields = {"input_ids": ids, "loss_mask": np.arange(length) >= min(3, length - 1)}
        found.append(RolloutSample(fields, f"s{index}"))
    return found


def roll_out(endpoint: str, count: int) -> None:
    """Push what rollout workers would; a program of their own in real life."""
    with RolloutProducer(endpoint) as producer:
        producer.push_many(rollouts(count))
        producer.end_stream()


def main() -> None:
    """Train until the stream ends, or for so many steps."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="127.0.0.1:7077")
    parser.add_argument("--output", type=Path, default=Path("build/hf_trainer"))
    parser.add_argument("--samples", type=int, default=96, help="to make up; 0: others push")
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--checkpoint", type=Path, help="to go on from")
    given = parser.parse_args()
    dist.init_process_group()
    if dist.get_rank() == 0 and given.samples:
        Thread(target=roll_out, args=(given.endpoint, given.samples), daemon=True).start()
    with MicroBatchStream(given.endpoint) as stream:
        trainer = make_trainer(stream, given.output, given.max_steps)
        if given.checkpoint is not None:
            resume(stream, given.checkpoint)
        trainer.train(resume_from_checkpoint=given.checkpoint and str(given.checkpoint))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
