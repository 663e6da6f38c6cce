"""One step to plan, put to us and to peers alike, and how an answer to it is rated.

Invariant: an answer is rated by what is here alone, whoever gave it; one that loses a sample or
has it twice is an error, not a figure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from rollout_planner import Quadratic
from rollout_planner.split.padded import begin_cost
from rollout_planner.types import CostModel, FloatArray, IntArray, Layout, Sync, round_up

#: [dp rank][micro-batch] -> indices of samples.
Schedule = Sequence[Sequence[Sequence[int]]]


class Corner(StrEnum):
    """What is asked of a planner; a peer answers those that it has a function for."""

    PADDED = "padded"
    BUDGET = "budget"
    GROUPS = "groups"
    EQUAL = "equal"
    COUNT = "count"
    MULTIPLE = "multiple"
    MINIMUM = "minimum"
    TOGETHER = "together"
    TIME = "time"


class Figure(StrEnum):
    """What a row compares; less is better in all of them."""

    TIME = "step time over an even share"
    COUNT = "micro-batches"
    EMPTY = "empty micro-batches"
    MS = "planning ms"


@dataclass(frozen=True, slots=True)
class Problem:
    """The samples of one step, int64[n], and what is asked.

    micro_batch_size: samples a micro-batch; micro_batch_tokens: its budget, of padded tokens where
    the layout pads; None for both: a rank's samples are one micro-batch. micro_batches: of a rank,
    for peers that are told so. multiple, minimum: of micro-batches a rank. group: of each sample;
    members are neighbours, and stay on one rank, or in one micro-batch (`together`).
    """

    lengths: IntArray
    dp_size: int
    cost: CostModel = field(default_factory=Quadratic)
    sync: Sync = Sync.MICRO_STEP
    layout: Layout = Layout.PACKED
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None
    micro_batches: int | None = None
    multiple: int = 1
    minimum: int = 1
    group: IntArray | None = None
    together: bool = False

    @property
    def costs(self) -> FloatArray:
        """Work of each sample."""
        return self.cost(self.lengths)


class Unanswered(Exception):
    """Why there is no figure: a planner has no function for this, refuses, or takes too long."""


#: What answers a problem; raises Unanswered.
Solve = Callable[[Problem], Schedule]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another project's planner. version: of its wheel, or its sources' commit and date."""

    name: str
    version: str
    solves: Mapping[Corner, Solve]


@dataclass(frozen=True, slots=True)
class Rating:
    """What an answer is worth.

    time: of the step, over the unpadded work / R that each rank would have at best; where peers are
    told how many micro-batches to make and we choose, with what it costs to begin each one more.
    priced: the same of any budget, with what it costs to begin each micro-batch.
    micro_batches: of the rank that has most. empty: micro-batches without samples, of all ranks,
    those included that ranks with fewer run for the others' sake, and up to the multiple and the
    minimum asked for. over_cap: micro-batches of
    several samples that exceed the budget.
    """

    time: float
    priced: float
    micro_batches: int
    empty: int
    over_cap: int


def rate(problem: Problem, schedule: Schedule) -> Rating:
    """Time, number and fill of an answer's micro-batches; AssertionError if it is none."""
    placed = sorted(i for rank in schedule for part in rank for i in part)
    assert placed == list(range(len(problem.lengths))), "a sample is lost, or there twice"
    assert len(schedule) == problem.dp_size, f"{len(schedule)} ranks of {problem.dp_size}"
    _check_groups(problem, schedule)
    most = round_up(max(problem.minimum, *(len(rank) for rank in schedule)), problem.multiple)
    cost = np.zeros((problem.dp_size, most))
    over = 0
    for r, rank in enumerate(schedule):
        for m, part in enumerate(rank):
            if len(part):
                cost[r, m] = work(problem, part)
                over += _exceeds(problem, part)
    together = cost.sum(axis=1).max() if problem.sync is Sync.STEP else cost.max(axis=0).sum()
    begun = 0.0
    if problem.micro_batch_tokens is not None:
        begun = begin_cost(problem.costs, problem.lengths, problem.micro_batch_tokens)
    priced = float(together) + most * begun
    if problem.micro_batches is not None:
        together += (most - problem.micro_batches) * begun
    filled = sum(len(part) > 0 for rank in schedule for part in rank)
    share = float(problem.costs.sum()) / problem.dp_size
    empty = problem.dp_size * most - filled
    return Rating(float(together) / share, priced / share, most, empty, over)


def work(problem: Problem, part: Sequence[int]) -> float:
    """Cost of a micro-batch, as it is laid out."""
    costs = problem.cost(problem.lengths[np.asarray(part)])
    return float(costs.max() * len(part) if problem.layout is Layout.PADDED else costs.sum())


def tokens(problem: Problem, part: Sequence[int]) -> int:
    """Tokens of a micro-batch, as it is laid out."""
    lengths = problem.lengths[np.asarray(part)]
    return int(lengths.max() * len(part) if problem.layout is Layout.PADDED else lengths.sum())


def _exceeds(problem: Problem, part: Sequence[int]) -> bool:
    if problem.micro_batch_size is not None:
        return len(part) > problem.micro_batch_size
    budget = problem.micro_batch_tokens
    return budget is not None and len(part) > 1 and tokens(problem, part) > budget


def _check_groups(problem: Problem, schedule: Schedule) -> None:
    if problem.group is None:
        return
    place = np.zeros(len(problem.lengths), dtype=np.int64)
    for r, rank in enumerate(schedule):
        for m, part in enumerate(rank):
            place[list(part)] = r * 10**6 + m * problem.together
    pairs = {(int(g), int(at)) for g, at in zip(problem.group, place, strict=True)}
    assert len(pairs) == len(np.unique(problem.group)), "a group is on several ranks"


def in_one_micro_batch(ranks: Sequence[Sequence[int]]) -> Schedule:
    """Ranks' samples, where it does not matter how a rank cuts them."""
    return [[list(rank)] for rank in ranks]


def cut(ranks: Sequence[Sequence[int]], size: int | None) -> Schedule:
    """Ranks' samples in runs of `size`; one run without it."""
    if size is None:
        return in_one_micro_batch(ranks)
    return [[list(r[at : at + size]) for at in range(0, len(r), size)] for r in ranks]
