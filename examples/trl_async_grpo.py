"""TRL's `AsyncGRPOTrainer`, fed by a dispatcher in place of its own queue on rank 0.

    dispatcher serve --dp-size 2 --global-batch-size 16 --group-size 4 --micro-batch-tokens 256 \
        --max-staleness 4
    torchrun --nproc-per-node 2 examples/trl_async_grpo.py

The trainer keeps its loss, its metrics, its packing and its weight sync; what comes in the place
of the rest is said in `rollout_workers.integrations`.

What generates is a stand-in here, without vLLM. Where the attention kernel of TRL is missing, as on
CPU, it is computed in plain torch.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.nn import functional
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)

from rollout_workers import MicroBatchStream, RolloutProducer, RolloutSample, StreamDataset
from rollout_workers.integrations.trl import GRPOSteps, steps_for_grpo

VOCABULARY, GENERATIONS = 96, 4


# integration: begin
class StreamGRPOTrainer(GRPOSteps, AsyncGRPOTrainer):
    """An AsyncGRPOTrainer whose batches are the steps of a stream, each a list of rows."""


# integration: end


class StandIn:
    """What generates, and what weights are sent to: the trainer's two protocols; on rank 0."""

    def __init__(self, endpoint: str, samples: list[RolloutSample]) -> None:
        self.rollout_buffer: Queue[Any] = Queue()  # stays empty: samples go to the dispatcher
        self.metrics_queue: Queue[Any] = Queue()
        self._endpoint, self._samples = endpoint, samples
        self._version = 0

    def start(self) -> None:
        """Begin; in a thread, as the trainer wants to go on."""
        Thread(target=self._roll_out, daemon=True).start()

    def _roll_out(self) -> None:
        with RolloutProducer(self._endpoint) as producer:
            for first in range(0, len(self._samples), GENERATIONS):
                group = self._samples[first : first + GENERATIONS]
                made = [
                    RolloutSample(e.fields, e.sample_id, policy_version=self._version)
                    for e in group
                ]
                producer.push_group(made, group_id=f"prompt-{first // GENERATIONS}")
            producer.end_stream()

    def update_model_version(self, model_version: int) -> None:
        """Rollouts from here on are of these weights."""
        self._version = model_version

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """A real one would load them."""
        for _ in iterator:
            pass

    def nothing(self, *_: object) -> None:
        """What a stand-in has no need of."""

    stop = check_health = init_weight_transfer = pause = resume = destroy = nothing


class PlainAttention:
    """The one function of flash-attn that TRL calls, for machines that its kernel is not for."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor,
        *_: int, softmax_scale: float | None, **__: object,
    ) -> Tensor:  # fmt: skip
        """[rows, heads, width] each; a segment's last query meets its last key."""
        found: list[Tensor] = []
        for segment in range(len(starts_q) - 1):
            rows, path = (slice(*at[segment : segment + 2].tolist()) for at in (starts_q, starts_k))
            q, k, v = (x.transpose(0, 1) for x in (query[rows], key[path], value[path]))
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
            seen = seen.tril(k.shape[1] - q.shape[1])
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )
            found.append(out.transpose(0, 1))
        return torch.cat(found)


def rollouts(count: int) -> list[RolloutSample]:
    """Groups of answers to a prompt, which they begin with, of heavy-tailed lengths."""
    rng = np.random.default_rng(0)
    found: list[RolloutSample] = []
    for _ in range(count // GENERATIONS):
        prompt = rng.integers(2, VOCABULARY, rng.integers(3, 9))
        rewards = rng.random(GENERATIONS)
        for reward in rewards:
            answer = rng.integers(2, VOCABULARY, int(np.clip(rng.lognormal(3, 1), 2, 150)))
            ids = np.concatenate([prompt, answer])
            fields = {
                "input_ids": ids,
                "loss_mask": np.arange(len(ids)) >= len(prompt),
                "logprobs": rng.normal(-np.log(VOCABULARY), 0.1, len(ids)).astype(np.float32),
                "advantage": np.float32((reward - rewards.mean()) / rewards.std()),
            }
            found.append(RolloutSample(fields, f"s{len(found)}"))
    return found


def tiny_model() -> Qwen2ForCausalLM:
    """Of random weights, the same on every rank."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Qwen2ForCausalLM(config)


def make_trainer(
    dataset: StreamDataset, generator: StandIn, folder: Path, max_steps: int
) -> StreamGRPOTrainer:
    """A trainer of a tiny model; all there is to say about the data is `max_steps`."""
    if not torch.cuda.is_available():  # there are no other places
        packing._flash_attn = lambda: PlainAttention
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    if dist.get_rank() == 0:
        tiny_model().save_pretrained(folder / "model")  # TRL wants a folder, as if from the hub
    dist.barrier()
    words = {"<pad>": 0, "<eos>": 1} | {f"w{n}": n for n in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    arguments = AsyncGRPOConfig(
        output_dir=str(folder),
        max_steps=max_steps,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        bf16=False,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = StreamGRPOTrainer(
        model=str(folder / "model"),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["none: others have them"]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
        rollout_worker=generator,
        weight_transfer=generator,
    )
    # integration: begin
    trainer.rollouts = dataset
    # integration: end
    return trainer


def main() -> None:
    """Train until the stream ends, or for so many steps."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="127.0.0.1:7077")
    parser.add_argument("--output", type=Path, default=Path("build/trl_async_grpo"))
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--max-steps", type=int, default=1000)
    given = parser.parse_args()
    dist.init_process_group()
    generator = StandIn(given.endpoint, rollouts(given.samples))
    with MicroBatchStream(given.endpoint) as stream:
        # integration: begin
        dataset = steps_for_grpo(stream)
        # integration: end
        make_trainer(dataset, generator, given.output, given.max_steps).train()
        dataset.commit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
