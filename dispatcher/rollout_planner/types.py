"""The words of planning: what a planner is asked and what it answers.

A `Window` is columns over the samples it may choose from, oldest first; a `Plan` answers with
positions in that window. Neither knows where samples live or how they travel.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_planner.tuning import SPLIT_OVERHEAD

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
_Count = TypeVar("_Count", int, IntArray)
_Items = TypeVar("_Items", IntArray, list[Any], tuple[Any, ...])

#: The pass over a step's micro-batches that trains; others have the trainer's names.
UPDATE = "update"

#: Token counts of samples, int64[n] -> estimated work, float64[n], monotone in the tokens.
CostModel = Callable[[IntArray], FloatArray]
#: Micro-batches that a rank may have: so many, or the next more. See `PlanConfig.micro_batches`.
Allowed = Callable[[int], int]


class Layout(StrEnum):
    """How a micro-batch is laid out in memory."""

    PACKED = "packed"
    PADDED = "padded"


class Sync(StrEnum):
    """Where DP ranks wait for each other: once a step, or at every micro-batch (FSDP, ZeRO-3)."""

    STEP = "step"
    MICRO_STEP = "micro-step"


class Strategy(StrEnum):
    """How samples are chosen and split; all but `window` take the oldest samples."""

    ROUND_ROBIN = "round-robin"
    GREEDY = "greedy"
    KK = "kk"
    WINDOW = "window"


class Grouping(StrEnum):
    """What stays together: nothing; a group in one step; there on one rank; in one micro-batch."""

    IGNORE = "ignore"
    STEP = "step"
    RANK = "rank"
    MICRO_BATCH = "micro-batch"


class MicroBatchOrder(StrEnum):
    """In which order a rank trains on the micro-batches of a step."""

    PEAK_FIRST = "peak-first"
    ENDS_SMALL = "ends-small"
    AS_PLANNED = "as-planned"


class Oversize(StrEnum):
    """What becomes of a sample that is longer than the token budget of a micro-batch."""

    ERROR = "error"
    ALONE = "alone"
    DROP = "drop"


def round_up(count: _Count, multiple: int) -> _Count:
    """The smallest multiple that is not below `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What every plan of a run has in common.

    by_groups: a step takes a number of groups, whatever their sizes (a sample without a group is
    one), and `dispatch_batch_size` is only about what it has in samples.
    Exactly one of `micro_batch_size` (samples) and `micro_batch_tokens` (budget) is set; the budget
    of a padded micro-batch is on its count times its longest sample. A rank has at least
    `min_micro_batches` and a multiple of `micro_batch_multiple`; for that micro-batches are split,
    and one is empty only where samples are fewer. A sample counts and costs as many tokens as the
    next multiple of `sample_length_multiple`, since ranks pad it to that. A rank has
    `pipeline_stages`, and its largest micro-batch counts once more for each beyond the first.
    No rank has more than `rank_tokens` in a step, which is smaller where need be; but one may have
    a single sample, or group that stays there, of more, and nobody skips more often for it.
    `outlier_max_skips=None` means `max_skips`. The heaviest samples of a window wait for each other
    and leave together, as far as `max_step_variation` lets them: the loss tokens of a step stray
    from those of as many mean arrivals by no more than this share of them, or by a standard
    deviation of what arrivals have; None: as far as balance has it.
    Up to `max_split` ranks, a power of two, may train a packed micro-batch under a budget together,
    each doubling for `split_overhead` of its time; then the oldest samples are taken, and all ranks
    count as equally fast.
    A plan whose excess is above `compared_above` is compared with other selections and splits; it
    says how good a plan may well be, serve's --max-imbalance when one is good enough to go early.
    What a split tries to wait less has to fit in `planning_budget`, seconds of one core, which are
    counted in operations, not timed. A unit of cost takes a rank `slowness` times as long as one of
    slowness 1; None: all are equally fast.
    """

    dp_size: int
    dispatch_batch_size: int
    cost: CostModel
    by_groups: bool = False
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None
    layout: Layout = Layout.PACKED
    sync: Sync = Sync.MICRO_STEP
    strategy: Strategy = Strategy.WINDOW
    grouping: Grouping = Grouping.STEP
    oversize: Oversize = Oversize.ERROR
    micro_batch_multiple: int = 1
    min_micro_batches: int = 1
    sample_length_multiple: int = 1
    pipeline_stages: int = 1
    micro_batch_order: MicroBatchOrder = MicroBatchOrder.PEAK_FIRST
    rank_tokens: int | None = None
    max_skips: int = 6
    outlier_max_skips: int | None = None
    max_step_variation: float | None = 0.25
    compared_above: float = 0.01
    planning_budget: float = 5e-3
    slowness: tuple[float, ...] | None = None
    max_split: int = 1
    split_overhead: float = SPLIT_OVERHEAD

    def micro_batches(self, needed: int) -> int:
        """Micro-batches a rank where `needed` would do: not below the minimum, and a multiple."""
        return round_up(max(needed, self.min_micro_batches), self.micro_batch_multiple)

    @property
    def capacity(self) -> float:
        """Ranks of slowness 1 that could do what these do."""
        if self.slowness is None:
            return self.dp_size
        return sum(1 / slow for slow in self.slowness)

    @property
    def pads_to_budget(self) -> bool:
        """Whether micro-batches are padded and hold any number of samples, within the budget."""
        return self.layout is Layout.PADDED and self.micro_batch_tokens is not None

    @property
    def budget_of_one(self) -> int | None:
        """Tokens that a single sample may have, padded: the budget of all ranks that share it."""
        return self.micro_batch_tokens if self.max_split == 1 else self.longest_in_budget

    @property
    def longest_in_budget(self) -> int | None:
        """Tokens of the longest sample that fits the budget once padded; None without a budget."""
        return longest_in_budget(
            self.micro_batch_tokens, self.sample_length_multiple, self.max_split
        )


def longest_in_budget(budget: int | None, multiple: int, max_split: int = 1) -> int | None:
    """See `PlanConfig.longest_in_budget`; where ranks share a sample, each has two pieces of it."""
    if budget is None:
        return None
    alone, pieces = budget - budget % multiple, 2 * max_split * multiple
    return max(alone, max_split * budget // pieces * pieces) if max_split > 1 else alone


@dataclass(frozen=True, slots=True)
class Window:
    """The samples that one selection may choose from, in arrival order, oldest first.

    tokens: int64[n], tokens of each sample, at least 1.
    skips: int64[n], dispatches that have passed the sample over.
    group: int64[n], equal for members of one group, -1 for none; groups are complete.
    must_go: bool[n], samples that this dispatch has to take whatever their skips.
    loss_tokens: int64[n], tokens of each sample that the loss counts; None where nobody knows.
    usual_loss_tokens: their mean and standard deviation among arrivals, where more is known than
        this window, in which the longest are held back.
    """

    tokens: IntArray
    skips: IntArray
    group: IntArray
    must_go: BoolArray
    loss_tokens: IntArray | None = None
    usual_loss_tokens: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: which window positions go to which micro-batch of which DP rank.

    Samples and sizes are kept flat: most who read a plan go through all of its samples, and to cut
    them takes as long as much of the planning.

    chosen: int64[n], positions in the window in delivery order: rank by rank, micro-batch by
        micro-batch.
    counts: int64[R, M], samples of each micro-batch; one of none is a filler.
    cp_sizes: int64[R, M], ranks of the block that trains each micro-batch, 2^k of them from a
        multiple of 2^k on; its samples are counted on the first. None: each is one rank's own.
    cost: float64[R, M], what each micro-batch takes its rank, estimated (0 for a filler).
    fifo_excess: straggler excess that a plain split of the same samples, in arrival order, has.
    lower_bound: the smallest time any split of these samples could need on these ranks, in cost.
    slowness: of the ranks that it was made for; their work is cost over it. None: 1 of each.
    """

    chosen: IntArray
    counts: IntArray
    cost: FloatArray
    sync: Sync
    fifo_imbalance: float
    fifo_excess: float
    lower_bound: float
    pipeline_stages: int = 1
    slowness: tuple[float, ...] | None = None
    cp_sizes: IntArray | None = None

    @property
    def micro_batches(self) -> tuple[tuple[IntArray, ...], ...]:
        """Positions in the window, [dp rank][micro-batch]; cut anew whenever asked for."""
        return self.laid_out(self.chosen)

    def laid_out(self, items: _Items) -> tuple[tuple[_Items, ...], ...]:
        """What there is of each sample, in delivery order, as [dp rank][micro-batch]."""
        parts, each = cut(items, self.counts.ravel().tolist()), self.num_micro_batches
        return tuple([tuple(parts[at : at + each]) for at in range(0, len(parts), each)])

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per DP rank."""
        return int(self.counts.shape[1])

    @property
    def imbalance(self) -> float:
        """Max over mean of the ranks' summed cost, minus one."""
        return imbalance(self.cost)

    @property
    def excess(self) -> float:
        """Straggler excess: share of trainer time lost to waiting, under this plan's sync."""
        if self.cp_sizes is not None:
            return max(0.0, self.time / self.even_time - 1) if self.even_time else 0.0
        return straggler_excess(self.cost, self.sync, self.pipeline_stages)

    @property
    def time(self) -> float:
        """What the step takes until ranks meet at its end, under this plan's sync, in cost."""
        if self.cp_sizes is not None and self.sync is Sync.STEP:
            return _time_of_blocks(self.cost, self.cp_sizes)
        return step_time(self.cost, self.sync, self.pipeline_stages)

    @property
    def even_time(self) -> float:
        """What it would take if nobody waited for anybody, in cost."""
        return even_time(self.cost, self.pipeline_stages)


def step_time(cost: FloatArray, sync: Sync, stages: int = 1) -> float:
    """What a step takes until ranks meet at its end, for cost[R, M]: the one formula of it.

    With `Sync.STEP` a rank goes through its micro-batches by itself, and the step takes what the
    slowest one does; with `Sync.MICRO_STEP` all go at the pace of each micro-step's largest. A
    pipeline of several stages fills and drains besides, and that takes its largest micro-batch once
    more for each stage beyond the first.
    """
    paces = cost if sync is Sync.STEP else np.maximum.reduce(cost, keepdims=True)
    times = np.add.reduce(paces, axis=1)
    if stages > 1:
        times = times + (stages - 1) * paces.max(axis=1)
    return float(np.maximum.reduce(times))


def _time_of_blocks(cost: FloatArray, cp_sizes: IntArray) -> float:
    """`step_time` where ranks wait for those of their block alone, whose micro-batch they begin
    together.
    """
    clock = np.zeros(len(cost))
    for took, sizes in zip(cost.T, cp_sizes.T, strict=True):
        first = np.arange(len(clock)) // sizes * sizes
        begins = np.zeros(len(clock))
        np.maximum.at(begins, first, clock)
        clock = begins[first] + took
    return float(clock.max())


def even_time(cost: FloatArray, stages: int = 1) -> float:
    """What a step of this work would take if all micro-batches of cost[R, M] were alike."""
    ranks, micro_batches = map(int, cost.shape)
    return float(np.add.reduce(cost, axis=None)) / ranks * bubble(stages, micro_batches)


def bubble(stages: int, micro_batches: int) -> float:
    """Time of a pipeline whose micro-batches are all alike, over what one stage does in it."""
    return 1 + (stages - 1) / micro_batches


def computed_lengths(
    tokens: IntArray, counts: IntArray, *, padded: bool, multiple: int = 1
) -> IntArray:
    """Tokens that are computed for each sample, int64[n], of micro-batches of so many samples each.

    Samples, in delivery order, are padded to a multiple; and to the longest where that is so.
    """
    s = round_up(tokens, multiple)
    if padded:
        which = np.repeat(np.arange(counts.size), counts.ravel())
        longest = np.zeros(counts.size, np.int64)
        np.maximum.at(longest, which, s)
        s = longest[which]
    return s


def summed(values: FloatArray, counts: IntArray) -> FloatArray:
    """Of each micro-batch, in the shape of its counts; values: float64[n], in delivery order."""
    which = np.repeat(np.arange(counts.size), counts.ravel())
    sums = np.bincount(which, weights=values, minlength=counts.size)
    return sums.astype(np.float64).reshape(counts.shape)


def straggler_excess(cost: FloatArray, sync: Sync, stages: int = 1) -> float:
    """`step_time` over `even_time`, minus one; 0 when nothing costs anything.

    Nowhere below 0, where rounding would have it: sums of it are counters, which must not fall.
    """
    even = even_time(cost, stages)
    return max(0.0, step_time(cost, sync, stages) / even - 1) if even > 0 else 0.0


def straggler_waits(cost: FloatArray, sync: Sync) -> FloatArray:
    """Wait of each rank for the slowest one where ranks meet, float64[R], for cost[R, M]."""
    paces = cost.sum(axis=1, keepdims=True) if sync is Sync.STEP else cost
    waits: FloatArray = (paces.max(axis=0) - paces).sum(axis=1)
    return waits


def imbalance(cost: FloatArray) -> float:
    """Max over mean of the rows' sums, minus one, for cost[R, M]: the excess of a whole step."""
    return straggler_excess(cost, Sync.STEP)


def digest_of(
    number: int,
    counts: list[list[int]],
    samples: Sequence[int | str],
    attempt: int = 0,
    usual_loss: float = 0.0,
    *,
    cp_sizes: Sequence[Sequence[int]] = (),
) -> str:
    """Fingerprint of who trains on what and when in step `number`, 32 hex digits.

    counts: samples of each micro-batch, [dp rank][micro-batch]. samples: in that order. attempt: at
    a plan of that step; the first one's fingerprint is that of releases that knew no others.
    usual_loss: loss tokens that a sample was expected to have; 0 where that is not known.
    cp_sizes: ranks that train each micro-batch together; empty where each is one rank's own.
    """
    more: list[object] = [value for value in (attempt, usual_loss) if value]
    if cp_sizes:
        more.append(list(map(list, cp_sizes)))
    named = ascii((number, counts, list(samples), *more)).encode()
    return blake2b(named, digest_size=16).hexdigest()


def cut(items: _Items, sizes: Iterable[int]) -> list[_Items]:
    """Pieces of these sizes, one after the other; of many small ones much faster than np.split."""
    ends: list[int] = list(accumulate(sizes))
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]
