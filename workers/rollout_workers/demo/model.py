"""A small causal transformer over packed samples, whose cost grows with length as a real one's.

Attention runs sample by sample inside a packed micro-batch, so no sample sees another and a
sample of s tokens costs a*s^2 + b*s.

`Meter` measures a DP rank's time by use: compute, wait for other ranks, reduce, wait for data. DDP
calls `before_reduce` when this rank's gradients are complete, just before it reduces them; there
the rank waits at a barrier, so that the wait for the last rank does not count as communication. The
model's gradients must fit one bucket, as then that moment is the end of the rank's own backward
pass.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy, gelu, pad, scaled_dot_product_attention

from rollout_workers.demo.data import VOCABULARY

#: Small enough for two cores; samples are long enough to dwarf the fixed cost of a step.
WIDTH, LAYERS, HEADS = 64, 2, 2


class Transformer(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        frequencies = 10_000.0 ** -torch.linspace(0, 1, WIDTH // 2)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, bounds: list[int]) -> Tensor:
        """int64[tokens], int64[tokens], n + 1 bounds of n samples -> float[tokens, vocabulary]."""
        angles = position_ids[:, None] * self.get_buffer("frequencies")
        hidden = self.embedding(input_ids) + torch.cat([angles.sin(), angles.cos()], dim=-1)
        for block in self.blocks:
            hidden = block(hidden, bounds)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor, bounds: list[int]) -> Tensor:
        hidden = hidden + self.out(self._attend(self.qkv(self.attention_norm(hidden)), bounds))
        added: Tensor = self.down(gelu(self.up(self.mlp_norm(hidden))))
        return hidden + added

    def _attend(self, qkv: Tensor, bounds: list[int]) -> Tensor:
        """Causal attention inside each sample, float[tokens, 3*width] -> [tokens, width]."""
        tokens = qkv.shape[0]
        query, key, value = qkv.view(tokens, 3, HEADS, -1).permute(1, 2, 0, 3).unbind()
        attended = [
            scaled_dot_product_attention(
                query[None, :, start:stop], key[None, :, start:stop], value[None, :, start:stop],
                is_causal=True,
            )
            for start, stop in pairwise(bounds)
        ]  # fmt: skip
        return torch.cat(attended, dim=2)[0].transpose(0, 1).reshape(tokens, -1)


def token_losses(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Loss of each token given those before it, float[tokens].

    The loss of a sample's first token, which is predicted from the sample before it, means nothing:
    its loss mask is zero.
    """
    losses = cross_entropy(logits[:-1], input_ids[1:], reduction="none")
    return pad(losses, (1, 0))


Item = TypeVar("Item")


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step on one DP rank; they add up to `step_s` but for the optimizer.

    compute_s: forward and backward, wall clock; cpu_s: processor time of the same thread in it.
    wait_s: own backward done, others' not. data_s: waiting for the step or its micro-batches.
    """

    step: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    loss_tokens: int = 0
    compute_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    reduce_s: float = 0.0
    data_s: float = 0.0
    step_s: float = 0.0


class Meter:
    """Stopwatch of a training loop; writes one line of JSON a step."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self.begin_step()

    def begin_step(self) -> None:
        """From now on everything belongs to a new step."""
        self.times = StepTimes()
        self._began = self._resumed = time.perf_counter()
        self._cpu = time.thread_time()

    def waited(self, get: Callable[[], Item]) -> Item:
        """Call `get`; the time that it takes counts as waiting for data."""
        self._pause_compute()
        try:
            return get()
        finally:
            self.times.data_s += self._resume_compute()

    def waiting_for(self, items: Iterable[Item]) -> Iterator[Item]:
        """Pass items on; the time until each arrives counts as waiting for data."""
        source = iter(items)
        with contextlib.suppress(StopIteration):
            while True:
                yield self.waited(source.__next__)

    def before_reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: wait for all ranks, then average the gradients."""
        assert bucket.is_last()
        self._pause_compute()
        dist.barrier()
        self.times.wait_s += self._resume_compute()
        group = dist.group.WORLD
        assert group is not None
        return allreduce_hook(group, bucket)

    def reduced(self) -> None:
        """The backward pass with the reduction in it has returned."""
        self.times.reduce_s += time.perf_counter() - self._resumed
        self._resumed, self._cpu = time.perf_counter(), time.thread_time()

    def end_step(self) -> StepTimes:
        """Write the step down and return it."""
        done = self.times
        done.step_s = time.perf_counter() - self._began
        self._output.write(json.dumps(asdict(done)) + "\n")
        self._output.flush()
        return done

    def _pause_compute(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        self.times.compute_s += now - self._resumed
        self.times.cpu_s += cpu - self._cpu
        self._resumed = now

    def _resume_compute(self) -> float:
        """Seconds since compute was paused."""
        now = time.perf_counter()
        passed = now - self._resumed
        self._resumed, self._cpu = now, time.thread_time()
        return passed
