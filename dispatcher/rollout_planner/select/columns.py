"""The column DP: which samples of the window form the tightest micro-steps.

Invariant: the answer keeps exactly `take` items.

Sorted by falling cost, a column of G neighbours costs G * largest - sum in waiting. The program
walks the columns from the heavy end; its state is how many items were skipped so far. Skipping an
item costs its penalty, which grows with age. Skips stay within a band around their share, and the
square of how far they lead or lag it has a price, so that the lengths that leave follow the lengths
that arrived. Light columns waste little: they are taken in runs, the longer the lighter.

Example: costs 9 5 5 1 1, take 4, G = 2: [9 5][5 1] wastes 8, skipping the 9 gives [5 5][1 1] and
wastes nothing.

Micro-steps that a large sample rules, filled to its level; the others share what is left.

Invariant: a bin holds at most `budget` tokens, or a single item that alone exceeds it.

A micro-step lasts at least as long as its largest item. Where that is more than an even share,
its bins are filled up to this level, with the largest items that fit, as every item that finds
room there is free of charge. But it must leave no more tokens than the later micro-steps can
well hold: its level rises until that is so. And it leaves a sample for each of their bins.

Example: R = 2, M = 2, costs 9 5 4 3 3: the share is 6, so the first micro-step gets level 9:
9 | 5 4; the second shares the rest: 3 | 3.
"""

from bisect import bisect_left
from heapq import heapify, heappop, heapreplace

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import running_sums
from rollout_planner.split.assign import Labels, lpt_budget
from rollout_planner.types import FloatArray, IntArray


def tightest(
    x: FloatArray, penalty: FloatArray, take: int, G: int, price: float | None = None
) -> IntArray:
    """Which of the items of falling cost `x` to keep, int64[take], rising.

    penalty: cost of skipping each item. price: of skips that are all ahead of their share, or all
    behind (default: `tuning.SKIPS`): a multiple of what the window would wait if all of it left in
    columns, as little should be paid where little can be saved.
    """
    N = len(x)
    E, columns = N - take, -(-take // G)
    skipped = np.unique(np.linspace(0, E, min(E, tuning.STATES) + 1).astype(np.int64))
    ends = (1 + np.arange(columns) // tuning.SINGLE_COLUMNS).cumsum()
    ends = G * np.append(0, np.unique(np.minimum(ends, columns)))
    taken = np.minimum(ends, take)
    heads, sums = _strided_sums(x, G, N + G), running_sums(x + penalty)
    begun = G * heads[skipped + ends[:, None]] - sums[skipped + taken[:, None]]
    waits, work = G * float(x[::G].sum()) - float(x.sum()), float(x.sum())
    price = tuning.SKIPS if price is None else price
    price *= max(waits, tuning.GOOD_ENOUGH * work) / (max(N * E, 1) * len(ends))
    ahead = skipped - E * taken[:, None] / take
    band = max(tuning.BAND * N, float(np.diff(taken).max()) * E / take) + 2
    led = np.where(np.abs(ahead) > band, np.inf, price * ahead**2)
    costs, best = np.diff(begun, axis=0) + led[1:], led[0]
    for run in costs:
        np.add(run, best, run)
        best = np.minimum.accumulate(run)
    states, state = [], len(best) - 1
    for run in costs[::-1]:
        state = int(run[: state + 1].argmin())
        states.append(state)
    kept: IntArray = np.arange(take) + skipped[states[::-1]].repeat(np.diff(taken))
    return kept


def _strided_sums(x: FloatArray, G: int, end: int) -> FloatArray:
    """H[i] = x[i-G] + x[i-2G] + ... for i below `end`, as if zeros followed.

    So the first items of the columns from item i to j, whole columns later, sum up to H[j] - H[i].
    """
    padded = np.zeros((-(-end // G) + 1) * G)
    padded[G : G + len(x)] = x
    return padded.reshape(-1, G).cumsum(axis=0).ravel()


def well_filled(tokens: float, room: float) -> float:
    """Share of its room that a micro-step may fill: halfway to full."""
    return (1 + tokens / room) / 2


def is_ruled(x: FloatArray, R: int, M: int) -> bool:
    """Whether the largest of falling `x` is more than an even share of several micro-steps."""
    return M > 1 and bool(x[0] * (R * M) > x.sum())


def fill_columns(x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> Labels | None:
    """Ruled micro-steps one by one, the others together by LPT; None if the latter fails."""
    filler = _Filler(x, s, R, M, budget)
    column = filler.fill_ruled()
    labels = np.array(filler.labels, dtype=np.int64)
    left = np.flatnonzero(labels < 0)
    rest = lpt_budget(x[left], s[left], R * (M - column), budget)
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
        n, top = len(self.cost), level * (1 + 1e-12)
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
