"""A trainer of four DP ranks in one process: each has its stream, and all one model's gradients.

What the ranks' micro-batches add to the gradients of one model is what four models' would sum to
(`grad_reduction="sum"`), without the reduction in between; so seeds cost half, and nothing of what
the dispatcher and the streams do is left out.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

import torch
from torch import Tensor

from rollout_workers import MicroBatch, MicroBatchStream, Step
from tests.convergence.policy import Policy

RANKS = 4
LEARNING_RATE = 4e-4
#: Cap of the importance weight of a token that an older policy wrote.
TRUNCATION = 2.0


class Trainer:
    """Trains a policy on what a dispatcher streams; a context manager.

    steps: optimizer steps over which the learning rate falls to nothing.
    staleness: policy versions that each sample was behind when it was trained on.
    """

    def __init__(self, policy: Policy, endpoint: str, steps: int) -> None:
        self._policy, self._steps = policy, steps
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0
        )
        self._stack = ExitStack()
        # A step comes once every rank has asked for it.
        self._threads = self._stack.enter_context(ThreadPoolExecutor(RANKS))
        self._streams: list[MicroBatchStream] = []
        for rank in range(RANKS):
            generation = self._streams[0].generation if rank else None
            stream = MicroBatchStream(
                endpoint, dp_rank=rank, dp_size=RANKS, generation=generation,
                layout="padded", grad_reduction="sum",
            )  # fmt: skip
            self._streams.append(self._stack.enter_context(stream))
        self.version = self.samples = 0
        self.staleness: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def train_step(self) -> bool:
        """One optimizer step on all ranks' micro-batches; False once the stream has ended."""
        taken = list(self._threads.map(lambda stream: next(stream, None), self._streams))
        steps = [step for step in taken if step is not None]
        if not steps:
            return False
        self._optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - self.version / self._steps)
        for micro_batch in _micro_batches(steps):
            loss = (self._token_losses(micro_batch) * micro_batch.loss_weights).sum()
            (loss * micro_batch.loss_scale).backward()  # type: ignore[no-untyped-call]
            if not micro_batch.is_filler:
                self._note(micro_batch)
        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        for step, stream in zip(steps, self._streams, strict=True):
            step.commit()
            stream.set_policy_version(self.version)
        return True

    def _token_losses(self, micro_batch: MicroBatch) -> Tensor:
        """GRPO's, with each token's importance weight truncated; float[rows, tokens]."""
        logprobs = self._policy.logprobs(micro_batch.input_ids, micro_batch.position_ids)
        with torch.no_grad():
            weights = (logprobs - micro_batch.logprobs).exp().clamp(max=TRUNCATION)
        return -weights * micro_batch.advantage[:, None] * logprobs

    def _note(self, micro_batch: MicroBatch) -> None:
        self.samples += micro_batch.num_samples
        versions = (version or 0 for version in micro_batch.policy_versions)
        self.staleness += [self.version - version for version in versions]


def _micro_batches(steps: list[Step]) -> Iterator[MicroBatch]:
    for step in steps:
        yield from step
