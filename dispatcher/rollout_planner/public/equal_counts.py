"""Steps whose ranks have equally many samples each, as some trainers need.

Invariant: every rank has n / R samples, and every micro-batch keeps to the budget, or has its fixed
size; no step is longer than with ranks by Karmarkar-Karp, as verl makes them.

With a fixed size it is the plan without that demand, or else Karmarkar-Karp's ranks, cut as
verl cuts them. Under a budget it begins with that plan: bins stay in their micro-step and
go to ranks by how many samples they have, the most to the rank with fewest. What is then missing on
a rank are single samples, taken from ranks that have too many: the cheapest of its micro-step, into
whichever it lengthens least. Unless that is level, ranks by Karmarkar-Karp are made as well; and
where the better one is not near the plan without the demand, ranks of nearly equal sums that pack
their samples by themselves, and the first plan with one more micro-batch. The shortest step is
taken, with what it costs to begin each micro-batch.

Example, R = 2, cost = tokens, budget 10, lengths 8 7 1 1 1 2: 8 1 1 | 7 2 1 is level and has three
on each; of 8 2 | 7 1 1 1 the last 1 would go to the first rank if the budget let it.
"""

from collections.abc import Callable

import numpy as np

from rollout_planner import tuning
from rollout_planner.public.packing import pack
from rollout_planner.public.partition import (
    as_lists,
    balanced_partition,
    by_falling_sum,
)
from rollout_planner.split.karmarkar_karp import differencing_labels
from rollout_planner.split.padded.runs import begin_cost
from rollout_planner.types import FloatArray, IntArray, PlanConfig, step_time

#: [dp rank][micro-batch][indices].
Step = list[list[list[int]]]


def with_equal_counts(
    freely: Callable[[int], Step], tokens: IntArray, x: FloatArray, config: PlanConfig
) -> Step:
    """tokens: int64[n], x: float64[n], cost of each; n is a multiple of the ranks.

    freely: the plan without that demand, of so many micro-batches a rank at least, packed under a
    budget or all full. Raises UnequalPartitions if a rank has fewer samples than micro-batches.
    """
    R, budget = config.dp_size, config.micro_batch_tokens or 1
    begun, share = begin_cost(x, tokens, budget), float(x.sum()) / R
    fewest = config.micro_batches(-(-int(tokens.sum()) // (R * budget)))

    def time(step: Step | None) -> float:
        if step is None:
            return np.inf
        load = np.array([[float(x[part].sum()) for part in rank] for rank in step])
        return step_time(load, config.sync) + begun * len(step[0])

    def moves(step: Step) -> Step | None:
        return _Moves(step, tokens, x, budget).made()

    if config.micro_batch_size is not None:
        return min(freely(1), _runs(x, R, config.micro_batch_size), key=time)
    free, enough = freely(1), (1 + tuning.NEAR_EQUAL_COUNTS) * share + begun * fewest
    best = moves(free)
    if time(best) > enough:
        best = min(best, _differenced(tokens, x, config), key=time)
    if time(best) > max(enough, time(free) + tuning.NEAR_EQUAL_COUNTS * share):
        more, each = len(free[0]) + 1, len(tokens) // R
        best = min(best, moves(freely(more)) if more <= each else None, key=time)
        best = min(best, _packed(tokens, x, config, required=best is None), key=time)
    assert best is not None, "what is required is made"
    return best


def _runs(x: FloatArray, R: int, size: int) -> Step:
    """Ranks by Karmarkar-Karp, cut into micro-batches of one size, the cheap ones at both ends."""
    step = []
    for rank in as_lists(differencing_labels(x, R, equal_size=True), R):
        rising = sorted(rank, key=lambda i: x[i])
        ends = rising[::2] + rising[1::2][::-1]
        step.append([ends[at : at + size] for at in range(0, len(ends), size)])
    return step


def _packed(tokens: IntArray, x: FloatArray, config: PlanConfig, *, required: bool) -> Step | None:
    """Ranks of nearly equal sums, packed one by one into as many micro-batches as any needs.

    Where a rank has fewer samples than that: UnequalPartitions if it is required, or else None.
    """
    ranks = balanced_partition(x, config.dp_size, equal_size=True)
    most, needed = 0, config.micro_batches(1)
    while needed > most:
        if needed > len(ranks[0]) and not required:
            return None
        most, step = needed, []
        for rank in ranks:
            bins = pack(
                tokens[rank], config.micro_batch_tokens or 1, cost=config.cost, minimum=most,
                multiple=config.micro_batch_multiple, fillers=False, oversize=config.oversize,
            )  # fmt: skip
            step.append([[rank[i] for i in part] for part in bins])
        needed = max(map(len, step))
    return step


def _differenced(tokens: IntArray, x: FloatArray, config: PlanConfig) -> Step | None:
    """As verl does it: Karmarkar-Karp over ranks, then within each; None if that is no legal step.

    As many micro-batches as the rank that needs most, and each rank's by falling cost.
    """
    budget = config.micro_batch_tokens or 1
    ranks = as_lists(differencing_labels(x, config.dp_size, equal_size=True), config.dp_size)
    M = max(-(-int(tokens[rank].sum()) // budget) for rank in ranks)
    while (M := config.micro_batches(M)) <= len(ranks[0]):
        step = []
        for rank in ranks:
            own = x[rank]
            parts = by_falling_sum(differencing_labels(own, M, equal_size=False), own, M)
            step.append([[rank[i] for i in part] for part in parts])
            if any(len(part) != 1 and not 0 < tokens[part].sum() <= budget for part in step[-1]):
                break
        else:
            return step
        M += 1
    return None


class _Moves:
    """Micro-batches [rank, micro-step] as they are changed: loads, tokens, and their samples."""

    def __init__(self, free: Step, tokens: IntArray, x: FloatArray, budget: int) -> None:
        self._tokens, self._x, self._budget = tokens, x, budget
        R, M = len(free), len(free[0])
        self._bins: Step = [[[] for _ in range(M)] for _ in range(R)]
        held = np.zeros(R, dtype=np.int64)
        columns = [[rank[at] for rank in free] for at in range(M)]
        for at in sorted(range(M), key=lambda at: -np.ptp(list(map(len, columns[at])))):
            dealt = sorted(columns[at], key=len, reverse=True)
            for rank, part in zip(np.argsort(held, kind="stable").tolist(), dealt, strict=True):
                self._bins[rank][at] = sorted(part, key=lambda i: -tokens[i])
                held[rank] += len(part)
        self._lacks = len(tokens) // R - held
        shape = (R, M)
        self._load, self._full = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        self._least = np.full(shape, -1)  # the cheapest sample, where there is another
        for rank in range(R):
            for at in range(M):
                self._sum_up(rank, at)

    def made(self) -> Step | None:
        """With as many samples on each rank; None if no micro-batch has room for one any more."""
        while self._lacks.any():
            giving, taking = np.flatnonzero(self._lacks < 0), np.flatnonzero(self._lacks > 0)
            least, steps = self._least[giving], np.arange(self._load.shape[1])
            cheapest = np.where(least < 0, np.inf, self._x[least])
            giver = cheapest.argmin(axis=0)
            sample, cost = least[giver, steps], cheapest[giver, steps]
            fits = self._full[taking] + self._tokens[sample] <= self._budget
            after = np.where(fits, self._load[taking] + cost, np.inf)
            taker = after.argmin(axis=0)
            longer = np.maximum(after[taker, steps] - self._load.max(axis=0), 0.0)
            at = int(np.lexsort((cost, longer))[0])
            if not np.isfinite(longer[at]):
                return None
            self._move(int(giving[giver[at]]), int(taking[taker[at]]), at)
        return self._bins

    def _move(self, giver: int, taker: int, at: int) -> None:
        sample = self._bins[giver][at].pop()
        own = self._bins[taker][at]
        own.append(sample)
        own.sort(key=lambda i: -self._tokens[i])
        self._lacks[giver] += 1
        self._lacks[taker] -= 1
        self._sum_up(giver, at)
        self._sum_up(taker, at)

    def _sum_up(self, rank: int, at: int) -> None:
        own = self._bins[rank][at]
        self._load[rank, at], self._full[rank, at] = self._x[own].sum(), self._tokens[own].sum()
        self._least[rank, at] = own[-1] if len(own) > 1 else -1
