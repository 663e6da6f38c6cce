"""The first policy, from which every run starts: it can add, and has seen how the careless do."""

import math

import numpy as np
import torch
from torch import Tensor

from tests.convergence.policy import Policy, padded
from tests.convergence.task import MAX_DIGITS, Ints, Problem, demonstration, positions, problem

ROWS = 64
LEARNING_RATE = 5e-3
#: Steps over which the learning rate rises.
WARM_UP = 50
#: Share of the steps in which chains are right: adding is learnt faster from those.
RIGHT = 0.75


def first_policy(seed: int, steps: int) -> Policy:
    """A policy after so many steps of learning from demonstrations of every length."""
    torch.manual_seed(seed)
    random = np.random.default_rng((seed, 0))
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate(step, steps)
        asked = [problem(random, int(d)) for d in random.integers(1, MAX_DIGITS + 1, ROWS)]
        careless = step >= RIGHT * steps
        chains = [demonstration(each, random) if careless else each.chain for each in asked]
        ids, places, counted = batch(asked, chains)
        loss = -(policy.logprobs(ids, places) * counted).sum() / counted.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return policy


def rate(step: int, steps: int) -> float:
    """Share of the learning rate: it rises, and falls again along a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def batch(asked: list[Problem], chains: list[Ints]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions, and 1 where a chain is; [rows, longest] each."""
    prompts = [each.prompt for each in asked]
    whole = [np.concatenate(pair) for pair in zip(prompts, chains, strict=True)]
    places = [positions(p.digits, len(c)) for p, c in zip(asked, chains, strict=True)]
    counted = [
        (np.arange(len(row)) >= len(prompt)).astype(np.int64)
        for row, prompt in zip(whole, prompts, strict=True)
    ]
    return padded(whole), padded(places), padded(counted)
