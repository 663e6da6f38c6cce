"""Karmarkar-Karp twice, as trainers do: samples onto ranks, then each rank's into micro-batches.

Invariant: ranks have as many samples each, or one fewer; whether a micro-batch keeps its budget is
for the caller to see, as differencing knows none.

Where samples are few and large it ends closer to level than what fills budgets greedily.
"""

import numpy as np

from rollout_dispatcher.balance.split.karmarkar_karp import karmarkar_karp
from rollout_dispatcher.balance.split.parts import Batch, Parts
from rollout_dispatcher.plan import IntArray, PlanConfig


def by_differences(batch: Batch, M: int, config: PlanConfig) -> Parts | None:
    """M micro-batches a rank; None if one of them is empty or exceeds the budget."""
    R, x = config.dp_size, batch.x
    if len(batch) < R * M:
        return None
    filled = np.append(x, np.zeros(-len(x) % R))
    bins = [
        own[one]
        for rank in karmarkar_karp(filled, R, equal_size=True)
        for own in [_samples(rank, len(x))]
        for one in karmarkar_karp(x[own], M, equal_size=False)
    ]
    counts = np.array([len(each) for each in bins])
    sequence = batch.order[np.concatenate(bins)]
    budget = config.micro_batch_tokens or 1
    held = np.add.reduceat(np.minimum(batch.tokens, budget)[sequence], np.cumsum(counts) - counts)
    if counts.min() < 1 or held.max() > budget:
        return None
    return Parts(sequence, counts.reshape(R, M))


def _samples(rank: list[int], n: int) -> IntArray:
    """Without what filled the number up."""
    found = np.array(rank, dtype=np.int64)
    kept: IntArray = found[found < n]
    return kept
