"""A batch of chosen samples, its micro-batches, what these cost, and their order.

Invariant: every sample is in exactly one micro-batch and every rank has the same number of them.
Indices are into the chosen samples, in arrival order.

`in_order` puts a step's micro-batches as memory or a pipeline wants them, at no price in waiting:
each rank keeps its own, and where ranks wait at every micro-step, one moves on all of them
together. An allocator that keeps the blocks it has been given asks for new ones whenever a
micro-batch is larger than all before it, and what it has may not fit: with the peak first it asks
once. What counts are tokens, as they are padded. A pipeline fills with its first micro-batches and
drains with its last, where most of its stages idle for as long as these take: it wants them small,
in cost. Of 4 9 7 2 8 the peak comes first in 9 8 7 4 2, and ends are small in 2 7 9 8 4.

`without_fillers` leaves no micro-batch empty while another has two samples. No micro-batch gains
samples but empty ones, so caps hold; with groups, ranks keep their samples. A rank with fewer
samples than micro-batches first gets the cheapest that others can spare; of its own the cheapest
goes, as it adds the least to its new micro-step: costs 9 | 4 3 1 | - become 9 | 4 3 | 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rollout_planner.order import by_falling_tokens, by_label
from rollout_planner.types import (
    FloatArray,
    IntArray,
    Layout,
    MicroBatchOrder,
    PlanConfig,
    Sync,
    cut,
    step_time,
)


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
    def of_labels(cls, sequence: IntArray, labels: IntArray, M: int, R: int) -> "Parts":
        """From the micro-batch of each sample of a sequence, numbered rank by rank."""
        counts = np.bincount(labels, minlength=R * M).reshape(R, M)
        return cls(sequence[by_label(labels, R * M)], counts)

    @classmethod
    def of_lists(cls, found: list[list[int]], R: int) -> "Parts":
        """From the samples of each micro-batch, rank by rank."""
        counts = np.array(list(map(len, found)), dtype=np.int64).reshape(R, -1)
        return cls(np.array([i for part in found for i in part], dtype=np.int64), counts)

    def labels(self) -> IntArray:
        """The micro-batch of each sample, numbered rank by rank."""
        labels = np.empty(len(self.sequence), dtype=np.int64)
        labels[self.sequence] = np.arange(self.counts.size).repeat(self.counts.ravel())
        return labels

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per DP rank."""
        return int(self.counts.shape[1])


def room_for(batch: Batch, config: PlanConfig) -> tuple[IntArray, int]:
    """What each sample takes of a micro-batch, int64[n], and what this holds: tokens, or samples.

    A sample above the budget takes all of it.
    """
    budget = config.micro_batch_tokens
    if budget is None:
        return np.ones(len(batch), dtype=np.int64), config.micro_batch_size or 1
    return np.minimum(batch.tokens, budget), budget


class Work:
    """What a split may spend to wait less: seconds of one core that are counted, not measured.

    So a plan depends on nothing but its arguments: a fast machine has the same as a slow one.
    What each method takes is in `tuning.py`.
    """

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def affords(self, seconds: float) -> bool:
        """Whether so much is left; if it is, it is spent."""
        if seconds > self.left:
            return False
        self.left -= seconds
        return True


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


def times(batch: Batch, parts: Parts, config: PlanConfig) -> FloatArray:
    """What each micro-batch takes its rank, float64[R, M], in cost."""
    cost = matrix(batch, parts, config.layout)
    return cost if config.slowness is None else cost * np.array(config.slowness)[:, None]


def time_of(batch: Batch, parts: Parts, config: PlanConfig) -> float:
    """Time that ranks need for these micro-batches, in cost."""
    return step_time(times(batch, parts, config), config.sync, config.pipeline_stages)


def in_order(batch: Batch, parts: Parts, config: PlanConfig) -> Parts:
    """The same micro-batches in the order that the config asks for."""
    (R, M), order = parts.counts.shape, config.micro_batch_order
    if M == 1 or order is MicroBatchOrder.AS_PLANNED:
        return parts
    if order is MicroBatchOrder.PEAK_FIRST:
        size = tokens_of(batch, parts, config)
    else:
        size = matrix(batch, parts, config.layout)
    if config.sync is Sync.MICRO_STEP:
        size = size.max(axis=0, keepdims=True)
    if order is MicroBatchOrder.PEAK_FIRST and (size[:, 1:] <= size[:, :-1]).all():
        return parts
    turns: IntArray = np.argsort(-size, axis=1, kind="stable")
    if order is MicroBatchOrder.ENDS_SMALL:
        turns = np.concatenate((turns[:, ::2][:, ::-1], turns[:, 1::2]), axis=1)
    if (turns == np.arange(M)).all():
        return parts
    return rearranged(parts, np.arange(R)[:, None] * M + turns)


def tokens_of(batch: Batch, parts: Parts, config: PlanConfig) -> FloatArray:
    """Tokens of each micro-batch, as its layout pads them, float64[R, M]."""
    return laid_out(batch.tokens, parts, config.layout)


def rearranged(parts: Parts, source: IntArray) -> Parts:
    """`parts` with micro-batch number `source[r, j]`, counted rank by rank, as rank r's j-th."""
    begins = (parts.counts.cumsum() - parts.counts.ravel())[source.ravel()]
    counts = parts.counts.ravel()[source]
    sizes = counts.ravel()
    shift = np.repeat(begins - (sizes.cumsum() - sizes), sizes)
    return Parts(parts.sequence[np.arange(len(shift)) + shift], counts)


def by_falling_load(parts: Parts, load: FloatArray) -> Parts:
    """`parts` with the micro-batches of each rank by falling load, float64[R, M]."""
    R, M = load.shape
    return rearranged(parts, np.argsort(-load, axis=1, kind="stable") + np.arange(R)[:, None] * M)


def without_fillers(batch: Batch, parts: Parts) -> Parts:
    """The same, but no micro-batch is empty while another that may give has two samples."""
    sequence, counts, cost = parts.sequence, parts.counts, batch.cost
    if counts.min() > 0 or counts.max() <= 1:
        return parts
    R, M = counts.shape
    labels = np.repeat(np.arange(R * M), counts.ravel())
    if batch.group is None:
        labels = _shared(labels, counts, cost[sequence])
        sequence = sequence[np.argsort(labels, kind="stable")]
        labels.sort()
        counts = np.bincount(labels, minlength=R * M).reshape(R, M)
    load = np.bincount(labels, weights=cost[sequence], minlength=R * M).reshape(R, M)
    cheapest_first = np.argsort(load.max(axis=0), kind="stable")
    found = cut(sequence.tolist(), counts.ravel().tolist())
    for r in np.flatnonzero(counts.min(axis=1) == 0).tolist():  # the others stay as they are
        empty = cheapest_first[counts[r, cheapest_first] == 0]
        _move_cheapest(found[r * M : (r + 1) * M], empty.tolist(), cost)
    return Parts.of_lists(found, R)


def _shared(labels: IntArray, counts: IntArray, cost: FloatArray) -> IntArray:
    """Ranks with fewer samples than micro-batches get the cheapest that others can spare."""
    M, sizes, labels = counts.shape[1], counts.sum(axis=1), labels.copy()
    by_rank = np.lexsort((cost, labels // M))
    place = np.arange(len(labels)) - np.repeat(sizes.cumsum() - sizes, sizes)
    spare = by_rank[place < np.repeat(np.maximum(sizes - M, 0), sizes)]
    empty = counts == 0
    wanted = np.flatnonzero(empty & (empty.cumsum(axis=1) <= (M - sizes)[:, None]))[: len(spare)]
    labels[spare[np.argsort(cost[spare], kind="stable")][: len(wanted)]] = wanted
    return labels


def _move_cheapest(rank: list[list[int]], empty: list[int], cost: FloatArray) -> None:
    """Samples by rising cost, each from its micro-batch as long as that has another."""
    cheapest = iter(sorted((cost[i], i, j) for j, part in enumerate(rank) for i in part))
    for j in empty:
        found = next(((i, k) for _, i, k in cheapest if len(rank[k]) > 1), None)
        if found is None:
            return
        rank[found[1]].remove(found[0])
        rank[j].append(found[0])
