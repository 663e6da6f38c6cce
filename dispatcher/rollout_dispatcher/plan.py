"""The words of planning: what a planner is asked and what it answers.

A `Window` is columns over the samples it may choose from, oldest first; a `Plan` answers with
positions in that window. Neither knows where samples live or how they travel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
_Count = TypeVar("_Count", int, IntArray)

#: Token counts of samples, int64[n] -> estimated work, float64[n], monotone in the tokens.
CostModel = Callable[[IntArray], FloatArray]


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
    Exactly one of `micro_batch_size` (samples) and `micro_batch_tokens` (budget) is set;
    `PADDED` needs the former. A sample counts and costs as many tokens as the next multiple of
    `sample_length_multiple`, since ranks pad it to that. `outlier_max_skips=None` means
    `max_skips`. With `outlier_lane` the heaviest samples of a window wait for each other and leave
    together.
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
    sample_length_multiple: int = 1
    max_skips: int = 6
    outlier_max_skips: int | None = None
    outlier_lane: bool = True

    @property
    def longest_in_budget(self) -> int | None:
        """Tokens of the longest sample that fits the budget once padded; None without a budget."""
        return longest_in_budget(self.micro_batch_tokens, self.sample_length_multiple)


def longest_in_budget(budget: int | None, multiple: int) -> int | None:
    """See `PlanConfig.longest_in_budget`."""
    return None if budget is None else budget - budget % multiple


@dataclass(frozen=True, slots=True)
class Window:
    """The samples that one selection may choose from, in arrival order, oldest first.

    tokens: int64[n], tokens of each sample, at least 1.
    skips: int64[n], dispatches that have passed the sample over.
    group: int64[n], equal for members of one group, -1 for none; groups are complete.
    must_go: bool[n], samples that this dispatch has to take whatever their skips.
    """

    tokens: IntArray
    skips: IntArray
    group: IntArray
    must_go: BoolArray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: which window positions go to which micro-batch of which DP rank.

    micro_batches: [dp rank][micro-batch] -> int64 positions in the window, the same number of
        micro-batches on every rank; an empty array is a filler.
    cost: float64[R, M], estimated work of each micro-batch (0 for a filler).
    fifo_excess: straggler excess that a plain split of the same samples, in arrival order, has.
    lower_bound: the smallest time any split of these samples could need on these ranks, in cost.
    """

    micro_batches: tuple[tuple[IntArray, ...], ...]
    cost: FloatArray
    sync: Sync
    fifo_imbalance: float
    fifo_excess: float
    lower_bound: float

    @property
    def chosen(self) -> IntArray:
        """Positions in the window of all samples in this plan, in delivery order."""
        return np.concatenate([part for rank in self.micro_batches for part in rank])

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per DP rank."""
        return int(self.cost.shape[1])

    @property
    def imbalance(self) -> float:
        """Max over mean of the ranks' summed cost, minus one."""
        return imbalance(self.cost)

    @property
    def excess(self) -> float:
        """Straggler excess: share of trainer time lost to waiting, under this plan's sync."""
        return straggler_excess(self.cost, self.sync)


def imbalance(cost: FloatArray) -> float:
    """Max over mean of the rows' sums, minus one, for cost[R, M]; 0 when nothing costs anything."""
    ranks = cost.sum(axis=1)
    mean = float(ranks.sum()) / len(ranks)
    return float(ranks.max()) / mean - 1 if mean > 0 else 0.0


def straggler_excess(cost: FloatArray, sync: Sync) -> float:
    """Time that ranks need together over total cost / R, minus one, for cost[R, M].

    With `Sync.STEP` that time is the most loaded rank's; with `Sync.MICRO_STEP` it is the sum
    over micro-steps of the maximum over ranks.
    """
    if sync is Sync.STEP:
        return imbalance(cost)
    total = float(cost.sum())
    return float(cost.max(axis=0).sum()) * cost.shape[0] / total - 1 if total > 0 else 0.0
