"""A trainer of several DP ranks in one process: each has its stream, and all one model's gradients.

What the ranks' micro-batches add to the gradients of one model is what four models' would sum to
(`grad_reduction="sum"`), without the reduction in between; so seeds cost half, and nothing of what
the dispatcher and the streams do is left out.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rollout_workers import MicroBatch, MicroBatchStream, Step
from tests.convergence.policy import Policy

#: Cap of the importance weight of a token that an older policy wrote.
TRUNCATION = 2.0


def grpo(policy: Policy, micro_batch: MicroBatch) -> Tensor:
    """GRPO's token losses, with each token's importance weight truncated; float[rows, tokens]."""
    logprobs = policy.logprobs(micro_batch.input_ids, micro_batch.position_ids)
    with torch.no_grad():
        weights = (logprobs - micro_batch.logprobs).exp().clamp(max=TRUNCATION)
    return -weights * micro_batch.advantage[:, None] * logprobs


def cross_entropy(policy: Policy, micro_batch: MicroBatch) -> Tensor:
    """Token losses of learning from examples; float[rows, tokens]."""
    return -policy.logprobs(micro_batch.input_ids, micro_batch.position_ids)


@dataclass(frozen=True, slots=True)
class Training:
    """How a task is trained on.

    long: tokens from which on samples are long, so that what their tokens weigh is noted.
    long_factor: of their token losses.
    """

    ranks: int
    learning_rate: float
    token_losses: Callable[[Policy, MicroBatch], Tensor]
    loss_normalisation: str = "token-mean"
    long: int | None = None
    long_factor: float = 1.0


class Trainer:
    """Trains a policy on what a dispatcher streams; a context manager.

    steps: optimizer steps over which the learning rate falls to nothing.
    staleness: policy versions that each sample was behind when it was trained on.
    """

    def __init__(self, policy: Policy, endpoint: str, steps: int, training: Training) -> None:
        self._policy, self._steps, self._training = policy, steps, training
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=training.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        self._stack = ExitStack()
        # A step comes once every rank has asked for it.
        self._threads = self._stack.enter_context(ThreadPoolExecutor(training.ranks))
        self._streams: list[MicroBatchStream] = []
        for rank in range(training.ranks):
            generation = self._streams[0].generation if rank else None
            stream = MicroBatchStream(
                endpoint, dp_rank=rank, dp_size=training.ranks, generation=generation,
                layout="padded", grad_reduction="sum",
                loss_normalisation=training.loss_normalisation,
            )  # fmt: skip
            self._streams.append(self._stack.enter_context(stream))
        self.version = self.samples = 0
        self.staleness: list[int] = []
        #: Of all and of long samples: loss tokens, and what they weigh together.
        self._tokens, self._weight = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}

    @property
    def long_weight(self) -> float | None:
        """What a loss token of a long sample has weighed, over the mean token's; None: no such."""
        if not self._tokens[True]:
            return None
        of_long, of_all = (self._weight[name] / self._tokens[name] for name in (True, False))
        return of_long / of_all

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
        self._optimizer.param_groups[0]["lr"] = self._training.learning_rate * (
            1 - self.version / self._steps
        )
        for micro_batch in _micro_batches(steps):
            losses = self._training.token_losses(self._policy, micro_batch)
            loss = (losses * self._weights(micro_batch)).sum()
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

    def _weights(self, micro_batch: MicroBatch) -> Tensor:
        """Each token's weight, float[rows, tokens], and a note of it."""
        if self._training.long is None or micro_batch.is_filler:
            return micro_batch.loss_weights
        is_long = torch.tensor(micro_batch.lengths) >= self._training.long
        factors = torch.where(is_long, self._training.long_factor, 1.0)
        weights = micro_batch.loss_weights * factors[:, None]
        for name, rows in ((True, is_long), (False, slice(None))):
            self._tokens[name] += float(micro_batch.loss_weights[rows].sum())
            self._weight[name] += float(weights[rows].sum()) * micro_batch.loss_scale
        return weights

    def _note(self, micro_batch: MicroBatch) -> None:
        self.samples += micro_batch.num_samples
        versions = (version or 0 for version in micro_batch.policy_versions)
        self.staleness += [self.version - version for version in versions]


def _micro_batches(steps: list[Step]) -> Iterator[MicroBatch]:
    for step in steps:
        yield from step
