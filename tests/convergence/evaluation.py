"""How good a policy is: its expected reward over fixed problems, exactly.

One chain earns the reward, so its probability is the expectation over all that the policy may
write at temperature 1. No sampling, so nothing but the policy makes two evaluations differ.
"""

import numpy as np
import torch

from tests.convergence.base import batch
from tests.convergence.policy import Policy
from tests.convergence.task import DIGIT_SHARES, MAX_DIGITS, problem

#: Problems of each number of digits; each number counts by its share among the problems asked.
PER_DIGITS = 64


def expected_reward(policy: Policy) -> float:
    """Over problems as they are asked."""
    return float(np.dot(by_digits(policy), DIGIT_SHARES))


@torch.no_grad()
def by_digits(policy: Policy) -> list[float]:
    """For problems of 1, 2, ... digits."""
    random = np.random.default_rng(2026)
    found = []
    for digits in range(1, MAX_DIGITS + 1):
        asked = [problem(random, digits) for _ in range(PER_DIGITS)]
        ids, places, counted = batch(asked, [each.chain for each in asked])
        likely = (policy.logprobs(ids, places) * counted).sum(dim=1).exp()
        found.append(float(likely.mean()))
    return found
