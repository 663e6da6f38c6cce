"""Rollouts: groups of chains for one problem each, rewarded, with GRPO's advantages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.convergence.base import batch
from tests.convergence.policy import Policy, generate
from tests.convergence.task import Problem, problem

#: Chains for one problem.
GROUP = 8


@dataclass(frozen=True, slots=True)
class Rollout:
    """One chain as it is pushed. reward: 0 or 1."""

    fields: dict[str, NDArray[Any]]
    reward: float

    @property
    def tokens(self) -> int:
        """Of prompt and chain."""
        return len(self.fields["input_ids"])


class Rollouts:
    """What policies write to problems that a seed decides on, whole groups one after the other."""

    def __init__(self, seed: int) -> None:
        self._problems = np.random.default_rng((seed, 1))
        self._chance = torch.Generator().manual_seed(seed)

    def write(self, policy: Policy, count: int) -> list[Rollout]:
        """So many rollouts, a multiple of GROUP."""
        asked = [problem(self._problems) for _ in range(count // GROUP)]
        return list(_rollouts(policy, asked, self._chance))


def _rollouts(
    policy: Policy, asked: Sequence[Problem], chance: torch.Generator
) -> Iterator[Rollout]:
    each = [one for one in asked for _ in range(GROUP)]
    chains = generate(policy, each, chance)
    rewards = np.array(
        [np.array_equal(chain, one.chain) for chain, one in zip(chains, each, strict=True)], float
    ).reshape(-1, GROUP)
    deviation = rewards.std(axis=1, keepdims=True) + 1e-4
    advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / deviation).ravel()
    ids, places, counted = batch(each, chains)
    with torch.no_grad():
        logprobs = policy.logprobs(ids, places).numpy()
    for row, (one, chain) in enumerate(zip(each, chains, strict=True)):
        size = len(one.prompt) + len(chain)
        fields: dict[str, NDArray[Any]] = {
            "input_ids": ids[row, :size].numpy(),
            "position_ids": places[row, :size].numpy(),
            "loss_mask": counted[row, :size].numpy().astype(np.bool_),
            "logprobs": logprobs[row, :size],
            "advantage": np.array(advantages[row], np.float32),
        }
        yield Rollout(fields, float(rewards.flat[row]))


def without_the_longest(rollouts: Sequence[Rollout], share: float) -> list[Rollout]:
    """All but the longest share of them, in their order."""
    longest_first = sorted(range(len(rollouts)), key=lambda index: -rollouts[index].tokens)
    dropped = set(longest_first[: round(share * len(rollouts))])
    return [one for index, one in enumerate(rollouts) if index not in dropped]
