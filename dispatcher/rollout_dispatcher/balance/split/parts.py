"""What is split and what comes of it: the chosen samples, and micro-batches of them.

Invariant: indices are into the chosen samples, in arrival order; `Parts` has each of them once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_dispatcher.balance.order import by_falling_tokens
from rollout_dispatcher.plan import FloatArray, IntArray, Layout, PlanConfig, Sync, round_up


@dataclass(frozen=True, slots=True)
class Batch:
    """The chosen samples in arrival order, and `order`, the same by falling tokens and cost.

    group: dense group number of each sample, where groups have to stay on one rank.
    """

    cost: FloatArray
    tokens: IntArray
    group: IntArray | None
    order: IntArray

    @classmethod
    def of(cls, cost: FloatArray, tokens: IntArray, group: IntArray | None = None) -> "Batch":
        """Sorts once."""
        return cls(cost, tokens, group, by_falling_tokens(tokens))

    def __len__(self) -> int:
        return len(self.cost)

    @property
    def x(self) -> FloatArray:
        """Costs in falling order."""
        return self.cost[self.order]


@dataclass(frozen=True, slots=True)
class Parts:
    """Micro-batches as one sequence of samples, rank by rank, and counts int64[R, M]."""

    sequence: IntArray
    counts: IntArray

    @classmethod
    def of_slots(cls, slots: IntArray, n: int) -> "Parts":
        """From slots[R, M, m], where slots of n or beyond are empty."""
        R, M, m = slots.shape
        if slots.size == n:
            return cls(slots.ravel(), np.full((R, M), m))
        return cls(slots[slots < n], (slots < n).sum(axis=2))

    @classmethod
    def of_lists(cls, ranks: Sequence[Sequence[IntArray]], multiple: int) -> "Parts":
        """From lists that may differ in length: shorter ranks get fillers."""
        M = round_up(max(1, *(len(rank) for rank in ranks)), multiple)
        counts = np.zeros((len(ranks), M), dtype=np.int64)
        for r, rank in enumerate(ranks):
            counts[r, : len(rank)] = [len(part) for part in rank]
        return cls(np.concatenate([part for rank in ranks for part in rank]), counts)

    def positions(self, chosen: IntArray) -> tuple[tuple[IntArray, ...], ...]:
        """Window positions of every micro-batch."""
        where, (R, M) = chosen[self.sequence], self.counts.shape
        if self.counts.min() == self.counts.max():
            return tuple(tuple(rank) for rank in where.reshape(R, M, -1))
        ends = np.cumsum(self.counts).reshape(R, M).tolist()
        start, ranks = 0, []
        for row in ends:
            starts = [start, *row[:-1]]
            ranks.append(tuple([where[a:b] for a, b in zip(starts, row, strict=True)]))
            start = row[-1]
        return tuple(ranks)


def matrix(batch: Batch, parts: Parts, layout: Layout) -> FloatArray:
    """Cost of each micro-batch, float64[R, M]; where the layout pads, of its padded shape."""
    counts = parts.counts.ravel()
    full = counts.nonzero()[0]
    counts = counts[full]
    starts = counts.cumsum() - counts
    cost = batch.cost[parts.sequence]
    if layout is Layout.PADDED:
        found = np.maximum.reduceat(cost, starts) * counts
    else:
        found = np.add.reduceat(cost, starts)
    out = np.zeros(parts.counts.shape)
    out.ravel()[full] = found
    return out


def step_time(batch: Batch, parts: Parts, config: PlanConfig) -> float:
    """What the step takes, in cost: of the most loaded rank, or of each micro-step's."""
    cost = matrix(batch, parts, config.layout)
    if config.sync is Sync.STEP:
        return float(cost.sum(axis=1).max())
    return float(cost.max(axis=0).sum())
