"""Packing samples as they are, not padded, into micro-batches that hold at most a budget of tokens.

Invariant: each item is in one bin; a bin holds at most `budget` tokens, or a single item that
alone exceeds it; the number M of bins a rank is the smallest that the ways below find, never
more than best fit needs, a number that is allowed, and the same on all ranks. Whether more are
worth it is for the strategy. A fixed number of samples is a budget of which each takes one.

Where ranks wait at every micro-step (`pack`), bins come in M columns of R, one a micro-step, and
only differences inside a column cost time. A micro-step lasts at least as long as its largest
item. Where that is more than an even share, the bins of its column are filled up to this level
with the largest items that fit, since what finds room there is free of charge; but it leaves
as many tokens as the later micro-steps can well hold, and an item for each of their bins: else its
level rises. The other columns share what is left by LPT under the budget; swaps then level each
column, until what is left to gain is less than any cost model knows. Where the budget is too tight
for that, bins are filled by tokens alone: LPT, then best fit. Full micro-batches of a fixed number
of samples leave swaps little room, so they begin as rows of neighbours (`pack_by_count`).

Example, R = 2, M = 2, costs 9 5 4 3 3: the share is 6, so the first micro-step gets level 9:
9 | 5 4; the second shares the rest: 3 | 3.
Example, R = 2, budget 10, cost = tokens, 8 5 4 3: 20 tokens need M = 1 bin a rank; 8 | 5 4, and 3
fits neither, nor by best fit, so M = 2.

Where ranks meet once a step (`pack_ranks`) what counts is the most that a rank has in all. Bins, as
few as can be, go to ranks, M to each, so that their sums are close. Where these are not level,
samples go to ranks by cost, largest first onto the least loaded, and each rank packs its own; what
finds no room there goes where there is some; and the better way stays. Swaps between ranks, in and
out of micro-batches with room, level what is left of either.

Example, R = 2, budget 10, tokens 10 6 5 5 3 2 1, cost tokens squared: 32 tokens need M = 2. By
cost 10 2 | 6 5 5 3 1 are 104 and 96, and the second rank packs as 6 3 1 and 5 5.
"""

from bisect import bisect_left
from heapq import heapify, heappop, heapreplace

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import falling_place
from rollout_planner.split import assign
from rollout_planner.types import Allowed, FloatArray, IntArray


def fewest_micro_batches(s: IntArray, R: int, budget: int) -> int:
    """Bound on M: room for all tokens, and a bin for each item above half the budget."""
    longest, tokens = int(np.maximum.reduce(s, initial=0)), int(np.add.reduce(s))
    alone = halves = 0
    if longest > budget:
        over = s > budget
        alone, tokens = int(np.count_nonzero(over)), int(s[~over].sum())
    if 2 * longest > budget:
        halves = int(np.count_nonzero(s > budget // 2))
    bins = max(alone - (-tokens // budget), halves, 1)
    return -(-bins // R)


def pack(
    x: FloatArray, s: IntArray, R: int, budget: int, allowed: Allowed = int
) -> tuple[IntArray, int]:
    """Bin of each item and M; bin b is micro-step b // R. Items descend in cost and in tokens."""
    labels, M = fill(x, s, R, budget, allowed)
    return level_columns(labels, x, s, R=R, M=M, budget=budget), M


def pack_by_count(x: FloatArray, R: int, M: int, most: int) -> IntArray:
    """Bin of each item, of which a bin has room for `most`: rows of neighbours, or LPT to levels.

    Swaps level the better of the two, unless it is good enough as it is.
    """

    def time(labels: IntArray) -> float:
        load = np.bincount(labels, weights=x, minlength=R * M)
        return float(-np.sort(-load)[::R].sum())

    even, each = float(x.sum()) / R * (1 + tuning.LEVEL_COLUMNS), -(-len(x) // (R * M))
    labels = assign.rows_of_neighbours(x, R, M, min(most, 2 * each))
    if time(labels) > even:
        level = assign.levels(
            x, R, M, company=(most - 1) * x.item(-1) if len(x) == R * M * most else 0.0
        )
        labels = min((labels, assign.lpt(x, R * M, most, np.repeat(level[0] - level, R))), key=time)
    if time(labels) > even:
        ones = np.ones(len(x), dtype=np.int64)
        labels = level_columns(labels, x, ones, R=R, M=M, budget=most)
    return labels


def fill(
    x: FloatArray, s: IntArray, R: int, budget: int, allowed: Allowed = int
) -> tuple[IntArray, int]:
    """As `pack`, before swaps level the columns.

    M is the least that all tokens need if items can be placed by cost, or by tokens; else it rises,
    up to what best fit needs.
    """
    M = allowed(fewest_micro_batches(s, R, budget))
    labels = _fill(x, s, R, M, budget)
    if labels is not None:
        return labels, M
    tight = assign.best_fit(s, np.full(len(s), budget), budget)
    enough = allowed(-(-assign.num_bins(tight) // R))
    while labels is None and enough > M:
        M = allowed(M + 1)
        labels = _fill(x, s, R, M, budget)
    return tight if labels is None else labels, M


def _fill(x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> IntArray | None:
    """By cost, micro-step after micro-step; else all at once; else by tokens alone."""
    labels = fill_columns(x, s, R, M, budget) if is_ruled(x, R, M) else None
    if labels is None:
        labels = assign.lpt_budget(x, s, R * M, budget)
    if labels is None:
        labels = assign.lpt_budget(s.astype(np.float64), s, R * M, budget)
    return labels


def level_columns(
    labels: IntArray, x: FloatArray, s: IntArray, *, R: int, M: int, budget: int
) -> IntArray:
    """Sort bins by cost, cut them into columns of R, swap inside columns."""
    bins = R * M
    load = np.bincount(labels, weights=x, minlength=bins).astype(np.float64)
    return assign.levelled(
        falling_place(load)[labels], x, bins, s, budget, rows=M, enough=tuning.LEVEL
    )


def well_filled(tokens: float, room: float) -> float:
    """Share of its room that a micro-step may fill: halfway to full."""
    return (1 + tokens / room) / 2


def is_ruled(x: FloatArray, R: int, M: int) -> bool:
    """Whether the largest of falling `x` is more than an even share of several micro-steps."""
    return M > 1 and bool(x[0] * (R * M) > x.sum())


def fill_columns(x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> IntArray | None:
    """Ruled micro-steps one by one, the others together by LPT; None if the latter fails."""
    filler = _Filler(x, s, R, M, budget)
    column = filler.fill_ruled()
    labels = np.array(filler.labels, dtype=np.int64)
    left = np.flatnonzero(labels < 0)
    rest = assign.lpt_budget(x[left], s[left], R * (M - column), budget)
    if rest is None:
        return None
    labels[left] = rest + column * R
    return labels


class _Filler:
    """Items are kept as lists, falling, for bisection; `after` skips those that are used."""

    def __init__(self, x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> None:
        self.cost, self.tokens = x.tolist(), s.tolist()
        self.falling_cost, self.falling_tokens = (-x).tolist(), (-s).tolist()
        self.after = list(range(len(x) + 1))  # leads to the first unused item at or after i
        self.labels = [-1] * len(x)
        self.R, self.M, self.budget = R, M, budget
        self.room: list[int] = []
        self.left, self.keep = len(x), 0  # items, and those that later micro-steps are to have
        self.left_cost, self.left_tokens = float(x.sum()), int(s.sum())
        self.fill = well_filled(self.left_tokens, R * M * budget)

    def fill_ruled(self) -> int:
        """Fill micro-steps until an even share exceeds the largest item left; how many."""
        for column in range(self.M - 1):
            first = self._unused(0)
            bins = self.R * (self.M - column)
            if first == len(self.cost) or self.cost[first] * bins <= self.left_cost:
                return column
            leave = self.fill * (bins - self.R) * self.budget
            self.keep = min(bins - self.R, self.left - self.R)
            self._fill_column(column * self.R, self.cost[first], leave)
        return self.M - 1

    def _fill_column(self, first_bin: int, level: float, leave: float) -> None:
        self.room = [self.budget] * self.R
        loads = [(0.0, b) for b in range(self.R)]
        cheapest = self.cost[-1] / max(self.tokens[-1], 1)
        for _ in range(tuning.RISES):
            loads = self._fill_to(level, loads, first_bin)
            if self.left_tokens <= leave or not loads:
                return
            level += (self.left_tokens - leave) * cheapest / len(loads)

    def _fill_to(
        self, level: float, heap: list[tuple[float, int]], first_bin: int
    ) -> list[tuple[float, int]]:
        """The least loaded bin takes the largest item that fits; what a higher level would open."""
        n, top = len(self.cost), level * (1 + tuning.ROUNDING)
        cost, tokens, room = self.cost, self.tokens, self.room
        falling_cost, falling_tokens = self.falling_cost, self.falling_tokens
        labels, after, budget = self.labels, self.after, self.budget
        closed = []
        heapify(heap)
        spare = self.left - self.keep
        while heap and spare > 0:
            load, b = heap[0]
            i = bisect_left(falling_cost, load - top)
            if room[b] < budget:
                i = max(i, bisect_left(falling_tokens, -room[b]))
            if after[i] != i:
                i = self._unused(i)
            if i == n:
                closed.append(heappop(heap))
                continue
            labels[i] = first_bin + b
            after[i] = i + 1
            room[b] = max(room[b] - tokens[i], 0)
            spare -= 1
            self.left_tokens -= tokens[i]
            self.left_cost -= cost[i]
            heapreplace(heap, (load + cost[i], b))
        self.left = spare + self.keep
        return [entry for entry in closed if room[entry[1]] >= tokens[-1]]

    def _unused(self, i: int) -> int:
        after = self.after
        while after[i] != i:
            after[i] = i = after[after[i]]
        return i


def pack_ranks(
    x: FloatArray, s: IntArray, R: int, budget: int, allowed: Allowed = int
) -> tuple[IntArray, int]:
    """Micro-batch of each item, numbered rank by rank, and M; items fall in cost and in tokens."""
    bins, M = fill(x, s, R, budget, allowed)
    t, load = np.minimum(s, budget), np.bincount(bins, weights=x, minlength=R * M)

    def levelled(labels: IntArray) -> IntArray:
        return assign.levelled(labels, x, R * M, t, budget, parts=M)

    def time(labels: IntArray) -> float:
        return float(np.bincount(labels // M, weights=x).max())

    found = levelled(assign.bins_onto_ranks(load.astype(np.float64), R, M)[bins])
    if time(found) > max(float(x.sum()) / R, x.item(0)) * (1 + tuning.LEVEL):
        start = _by_samples(x, t, R, M, budget)
        found = found if start is None else min((found, levelled(start)), key=time)
    return found, M


def count_ranks(x: FloatArray, R: int, M: int, most: int) -> IntArray:
    """The same where a micro-batch has room for `most` items: then any M * `most` of a rank fit."""
    ids = assign.members(assign.lpt(x, R, M * most), R)[:, : M * most]
    assign.swap_level(ids[None], np.append(x, 0.0))
    labels = np.empty(len(x) + 1, dtype=np.int64)
    labels[ids] = np.arange(R)[:, None] * M + np.arange(ids.shape[1]) % M
    return labels[:-1]


def _by_samples(x: FloatArray, t: IntArray, R: int, M: int, budget: int) -> IntArray | None:
    """Samples onto ranks, then each rank's into its micro-batches; None if some find no room.

    What its rank has no room for goes where there is some, on the least loaded rank.
    """
    rank = assign.lpt_budget(x, t, R, M * budget)
    if rank is None:
        return None
    rank = assign.levelled(rank, x, R, t, M * budget)
    own = assign.fill_sets(x, t, rank, M, budget)
    labels = np.where(own < 0, -1, own + rank * M)
    placed = labels >= 0
    room = budget - np.bincount(labels[placed], t[placed], R * M).astype(np.int64)
    load = np.bincount(rank[placed], x[placed], R)
    for i in np.flatnonzero(~placed).tolist():
        fits = np.flatnonzero(room >= t[i])
        if not len(fits):
            return None
        labels[i] = b = fits[load[fits // M].argmin()]
        room[b] -= t[i]
        load[b // M] += x[i]
    return labels
