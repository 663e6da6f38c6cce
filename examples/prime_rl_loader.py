"""prime-rl: a data loader for its trainer that yields the stream's steps.

Start the trainer by this file in place of prime-rl's own entry point, with the same arguments:

    dispatcher serve --dp-size 8 --global-batch-size 512 --micro-batch-tokens 32768
    export DISPATCHER_ENDPOINT=127.0.0.1:7077
    torchrun --nproc-per-node 8 examples/prime_rl_loader.py @ trainer.toml

prime-rl's orchestrator packs each batch for all ranks and sends every rank its part. Here whoever
collects rollouts pushes them as they come, with `advantages`, `inference_logprobs` and
`temperatures` one a token, and where there are several environments `environment`, a number a
sample. The trainer divides by the loss tokens of the whole step over all ranks by itself.
"""

import os
from pathlib import Path
from typing import Any

import torch
from prime_rl.trainer.rl.data import TensorMicroBatch

from rollout_workers import MicroBatch, MicroBatchStream

#: Names of environments, in the order of the numbers in the field `environment`.
ENVIRONMENTS = ["env"]
OPTIONAL = (
    "ref_logprobs", "routed_experts", "mm_token_type_ids", "rl_weights", "ce_weights",
    "ref_kl_weights",
)  # fmt: skip

# integration: begin


class StreamDataLoader:
    """What prime-rl's `DataLoader` does, over a stream."""

    def __init__(
        self, output_dir: Path, start_step: int, dp_world_size: int, config: object
    ) -> None:
        del output_dir, start_step, config  # of its own transport
        self.stream = MicroBatchStream(os.environ["DISPATCHER_ENDPOINT"], epochs=1)
        assert dp_world_size == torch.distributed.get_world_size(), (
            "pass process_group= of DP ranks"
        )
        self.step: Any = None

    def wait_for_batch(self) -> None:
        """Commit the step before, whose optimizer step is done, and take the next."""
        self.commit()
        self.step = next(self.stream, None)
        if self.step is None:
            raise RuntimeError(f"no more batches: {self.stream.end_reason}; set max_steps")

    def get_batch(self) -> list[TensorMicroBatch]:
        """The step's micro-batches on this rank."""
        return [as_prime_rl(micro_batch) for micro_batch in self.step]

    def commit(self) -> None:
        """The step at hand, if there is one, is trained on."""
        if self.step is not None:
            self.step.commit()
        self.step = None


def as_prime_rl(micro_batch: MicroBatch) -> TensorMicroBatch:
    """One packed row: per-token tensors [1, tokens]; a filler's mask is all false."""
    tensors = micro_batch.tensors
    lengths = micro_batch.cu_seqlens.diff()
    row = {
        name: tensors[name][None] for name in tensors if name in TensorMicroBatch.__annotations__
    }
    places = tensors.get("environment", torch.zeros_like(lengths)).long()
    names = [ENVIRONMENTS[place] for place in places.repeat_interleave(lengths).tolist()]
    temperatures = torch.ones(row["input_ids"].shape)
    alone = {"temperatures": temperatures, "mm_kwargs": None, **dict.fromkeys(OPTIONAL)}
    return TensorMicroBatch(
        **{**alone, **row},
        env_names=names,
        sequence_lengths=lengths.tolist(),
        seq_lens=lengths.long(),
        lora_num_tokens=torch.tensor([len(names)], dtype=torch.int32),
    )


# integration: end


def main() -> None:
    """prime-rl's trainer, with this loader."""
    from prime_rl.trainer.rl import train  # noqa: PLC0415  only trainers have what it imports

    made: list[StreamDataLoader] = []

    class Loader(StreamDataLoader):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    train.DataLoader = Loader
    train.main()
    for loader in made:
        loader.commit()  # the last step's optimizer step is done as well
        loader.stream.close()


if __name__ == "__main__":
    main()
