"""Hugging Face `Trainer`, fed by a dispatcher: its batch is a step, all micro-batches of it.

    dispatcher serve --dp-size 2 --global-batch-size 16 --micro-batch-tokens 256
    torchrun --nproc-per-node 2 examples/hf_trainer.py

The Trainer keeps its own loss, its own normalisation (`num_items_in_batch` over all micro-batches
and ranks), its logging and its checkpoints; how is said in `rollout_workers.integrations`.
"""

from argparse import ArgumentParser
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from rollout_workers import MicroBatchStream, RolloutProducer, RolloutSample, StreamDataset
from rollout_workers.integrations.hugging_face import WholeSteps, steps_for_trainer

VOCABULARY = 96


# integration: begin
class StreamTrainer(WholeSteps, Trainer):
    """A Trainer whose batches are the steps of a stream, each a list of micro-batches."""


# integration: end


class SaveStream(TrainerCallback):
    """Checkpoints hold the stream's state; the journal frees what they cover."""

    def __init__(self, dataset: StreamDataset) -> None:
        self._dataset = dataset

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        stream = self._dataset.state_dict()
        if state.is_world_process_zero:  # it is the same on every rank
            torch.save(stream, f"{args.output_dir}/checkpoint-{state.global_step}/stream.pt")
            self._dataset.stream.checkpoint_saved(stream)


def tiny_model() -> LlamaForCausalLM:
    """Of random weights, the same on every rank."""
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


def make_trainer(dataset: StreamDataset, output: Path, max_steps: int) -> StreamTrainer:
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
    return StreamTrainer(
        model=tiny_model(), args=arguments, train_dataset=dataset, callbacks=[SaveStream(dataset)]
    )


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
        # integration: begin
        dataset = steps_for_trainer(stream)
        # integration: end
        if given.checkpoint is not None:
            dataset.load_state_dict(torch.load(given.checkpoint / "stream.pt"))
        trainer = make_trainer(dataset, given.output, given.max_steps)
        trainer.train(resume_from_checkpoint=given.checkpoint and str(given.checkpoint))
        dataset.commit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
