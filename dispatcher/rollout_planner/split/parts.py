"""The words of splitting: a batch of chosen samples, the micro-batches it is cut into, their cost.

Invariant: every sample is in exactly one micro-batch and every rank has the same number of them.
Indices are into the chosen samples, in arrival order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import by_falling_tokens
from rollout_planner.split.budgets.fillers import fill_empty
from rollout_planner.types import (
    FloatArray,
    IntArray,
    Layout,
    PlanConfig,
    Sync,
    step_time,
)
from rollout_planner.work import Work


@dataclass(frozen=True, slots=True)
class Padded:
    """Items of several samples. longest: float64[n], cost of the longest sample of each; size:
    int64[n], how many it has.
    """

    longest: FloatArray
    size: IntArray


@dataclass(frozen=True)
class Batch:
    """The chosen samples in arrival order, and `order`, the same by falling tokens and cost.

    group: dense group number of each sample, where groups have to stay on one rank. padded: where
    each is an item of several samples that a micro-batch pads, what these are.
    """

    cost: FloatArray
    tokens: IntArray
    group: IntArray | None
    order: IntArray
    padded: Padded | None = None

    @classmethod
    def of(cls, cost: FloatArray, tokens: IntArray, group: IntArray | None = None) -> "Batch":
        """Sorts once."""
        return cls(cost, tokens, group, by_falling_tokens(tokens))

    def __len__(self) -> int:
        return len(self.cost)

    @cached_property
    def x(self) -> FloatArray:
        """Costs in falling order."""
        return self.cost[self.order]

    @cached_property
    def dearest_first(self) -> IntArray:
        """Positions by falling cost: `order`, but that items of several samples may have another.

        Four short samples are dearer than one that is twice as long and has fewer tokens.
        """
        if (self.x[1:] <= self.x[:-1]).all():
            return self.order
        return np.argsort(-self.cost, kind="stable")

    @cached_property
    def falling(self) -> FloatArray:
        """Costs in that order."""
        return self.x if self.dearest_first is self.order else self.cost[self.dearest_first]

    @cached_property
    def s(self) -> IntArray:
        """Tokens in falling order."""
        return self.tokens[self.order]


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
    def of_ranks(cls, sequence: IntArray, sizes: IntArray, M: int, m: int) -> "Parts":
        """From the samples of each rank, rank by rank, cut in this order into runs of m."""
        if len(sequence) == len(sizes) * M * m:
            return cls(sequence, np.full((len(sizes), M), m))
        return cls(sequence, np.clip(sizes[:, None] - np.arange(M) * m, 0, m))

    @classmethod
    def of_lists(cls, ranks: Sequence[Sequence[IntArray]], config: PlanConfig) -> "Parts":
        """From lists that may differ in length: shorter ranks get fillers."""
        M = config.micro_batches(max(1, *(len(rank) for rank in ranks)))
        counts = np.zeros((len(ranks), M), dtype=np.int64)
        for r, rank in enumerate(ranks):
            counts[r, : len(rank)] = [len(part) for part in rank]
        return cls(np.concatenate([part for rank in ranks for part in rank]), counts)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per DP rank."""
        return int(self.counts.shape[1])


def slots_of_each(n: int, bins: int, most: int) -> int:
    """Slots that each bin has for n samples if it may hold so many: no more than are of use.

    Where bins may hold all samples, most slots would be empty, and there could be any number.
    """
    return min(most, max(2 * -(-n // bins), tuning.FEW_SLOTS // bins))


#: How one layout or limit is served: the micro-batches of every rank. What is left of the work pays
#: for trying more than one way.
Splitter = Callable[[Batch, PlanConfig, Work], Parts]


def matrix(batch: Batch, parts: Parts, layout: Layout) -> FloatArray:
    """Cost of each micro-batch, float64[R, M]; where the layout pads, of its padded shape."""
    if batch.padded is None:
        return laid_out(batch.cost, parts, layout)
    longest = reduced(np.maximum, batch.padded.longest, parts)
    return longest * reduced(np.add, batch.padded.size, parts)


def laid_out(of: FloatArray | IntArray, parts: Parts, layout: Layout) -> FloatArray:
    """The same of any number that samples have."""
    if layout is Layout.PADDED:
        return reduced(np.maximum, of, parts) * parts.counts
    return reduced(np.add, of, parts)


def reduced(by: np.ufunc, of: FloatArray | IntArray, parts: Parts) -> FloatArray:
    """What that makes of the samples of each micro-batch, float64[R, M]; 0 where it has none."""
    shape, counts, of = parts.counts.shape, parts.counts.ravel(), of[parts.sequence]
    if len(of) == len(counts) == np.count_nonzero(counts):
        return of.reshape(shape).astype(np.float64, copy=False)
    full = counts.nonzero()[0]
    counts = counts[full]
    out = np.zeros(shape)
    out.ravel()[full] = by.reduceat(of, counts.cumsum() - counts)
    return out


def evenly(sizes: IntArray, M: int) -> IntArray:
    """Samples of each of M micro-batches, int64[..., M], if `sizes` of them are dealt out alike."""
    ends = sizes[..., None] * np.arange(1, M + 1) // M
    counts: IntArray = np.diff(ends, axis=-1, prepend=0)
    return counts


def without_fillers(batch: Batch, parts: Parts, config: PlanConfig) -> Parts:
    """The same, but no micro-batch is empty while another that may give has two samples."""
    if np.count_nonzero(parts.counts) == parts.counts.size or parts.counts.max() <= 1:
        return parts
    sequence, counts = fill_empty(
        parts.sequence,
        parts.counts,
        batch.cost,
        halve=config.sync is Sync.STEP,
        across=batch.group is None,
    )
    return Parts(sequence, counts)


def time_of(batch: Batch, parts: Parts, config: PlanConfig) -> float:
    """Time that ranks need for these micro-batches, in cost."""
    return step_time(matrix(batch, parts, config.layout), config.sync, config.pipeline_stages)
