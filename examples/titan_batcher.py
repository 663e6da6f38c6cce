"""torchtitan: its trainer, fed by the stream. Checked with torchtitan 0.3.0.

    dispatcher serve --dp-size 2 --global-batch-size 16 --micro-batch-tokens 4096
    torchrun --standalone --nproc-per-node 2 examples/titan_batcher.py --steps 100

A torchtitan component is a class with a Config; `Batcher` is the one that its trainer builds as
`dataloader` and gets `(inputs, labels)` from. How many micro-batches a step has is the dispatcher's
choice, so `StreamTrainer` accumulates as many as the step at hand has, and commits it once the
optimizer has made its step; that it does before a checkpoint is saved, which holds the stream too.
Here it trains torchtitan's Llama 3 architecture in its smallest size.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from rollout_workers import MicroBatch, MicroBatchStream

# integration: begin


class Batcher(BaseDataLoader):
    """Micro-batches of the stream as torchtitan takes them.

    They are packed: torchtitan's attention takes from the positions where each sample begins.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        endpoint: str = "127.0.0.1:7077"

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **_: Any) -> None:
        # Ranks agree on a generation over the process group of the ranks that get different data.
        self.stream = MicroBatchStream(config.endpoint, epochs=1)
        self.step: Any = None

    def next_step(self) -> int:
        """Take the next step; returns how many micro-batches it has on every rank."""
        self.step = next(self.stream, None)
        if self.step is None:
            raise DataloaderExhaustedError
        return len(self.step)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for micro_batch in self.step:
                yield inputs_and_labels(micro_batch)

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.stream.load_state_dict(state)


def inputs_and_labels(micro_batch: MicroBatch) -> tuple[dict[str, Tensor], Tensor]:
    """[1, tokens] each; a target stands where the token before it does, as torchtitan has them."""
    ids = micro_batch.input_ids
    targets = ids.masked_fill(micro_batch.loss_weights == 0, IGNORE_INDEX)
    # A sample's first token is no target, so none is predicted from another sample.
    labels = torch.nn.functional.pad(targets[1:], (0, 1), value=IGNORE_INDEX)
    return {"input": ids[None], "positions": micro_batch.position_ids[None]}, labels[None]


class StreamTrainer(Trainer):
    """torchtitan's trainer, whose steps are the dispatcher's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """As it is; a Config builds the class that it stands in."""

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        self.gradient_accumulation_steps = self.dataloader.next_step()
        super().train_step(data_iterator)
        self.dataloader.step.commit()


# integration: end


class NoTokenizer(BaseTokenizer):
    """Samples come as token ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--endpoint", default="127.0.0.1:7077")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    spec = model_registry("debugmodel", attn_backend="flex")
    config = StreamTrainer.Config(
        model_spec=spec,
        tokenizer=NoTokenizer.Config(),
        dataloader=Batcher.Config(endpoint=args.endpoint),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-3),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=1, seq_len=256, steps=args.steps, disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    )  # fmt: skip
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.dataloader.stream.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
