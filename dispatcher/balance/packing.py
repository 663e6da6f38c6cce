"""Packing with a token budget: micro-batches of any count whose tokens stay within the budget.

Invariant: each item is in one bin; a bin holds at most `budget` tokens, or a single item that
alone exceeds it; the number M of bins a rank is the smallest that the heuristics below can
fill, rounded up to `multiple`, and the same on all ranks. Fewer micro-batches come before less
waiting: M is settled first.

Bins come in M columns of R, one a micro-step, and only differences inside a column cost time.
So column j gets a level (bounds.levels), bins start at the distance of their level from the
highest, and one LPT pass fills all of them; swaps then level each column. Where the budget is
too tight for that, bins are filled by tokens alone: LPT, then best fit decreasing.

Example, budget 10, R = 2, items of 8, 5, 4, 3 tokens, cost = tokens: 20 tokens need M = 1 bin a
rank; 8 | 5, 4 joins 5, 3 fits neither: best fit gives no room either (8 | 5 4), so M = 2.
"""

import heapq
from bisect import bisect_left, bisect_right, insort

import numpy as np

from dispatcher.balance.leveling import CHUNKED_FROM, swap_level
from dispatcher.plan import FloatArray, IntArray

Labels = IntArray
#: Share of their tokens up to which columns fill well; how often a level may rise for it.
WELL_FILLED = 0.97
_RISES = 8


def fewest_micro_batches(s: IntArray, R: int, budget: int, multiple: int = 1) -> int:
    """Bound on M: room for all tokens, and a bin for each item above half the budget."""
    over = s > budget
    alone = int(over.sum())
    by_tokens = alone + -(-int(s[~over].sum()) // budget)
    bins = max(by_tokens, int((2 * s > budget).sum()), 1)
    return round_up(-(-bins // R), multiple)


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple that is not below `count`."""
    return -(-count // multiple) * multiple


def pack(x: FloatArray, s: IntArray, R: int, budget: int, multiple: int = 1) -> tuple[Labels, int]:
    """Bin of each item and M; bin b is micro-step b // R. Items descend in cost and in tokens."""
    M = fewest_micro_batches(s, R, budget, multiple)
    while True:
        labels = _pack_into(x, s, R, M, budget)
        if labels is not None:
            return labels, M
        M += multiple


def _pack_into(x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> Labels | None:
    """A packing into M columns of R bins, by the first way that finds one, or None."""
    for attempt in (fill_columns, _fill_evenly, _fill_by_tokens, _fill_by_fit):
        labels = attempt(x, s, R, M, budget)
        if labels is not None:
            return level_columns(labels, x, s, R=R, M=M, budget=budget)
    return None


def _fill_evenly(x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> Labels | None:
    return lpt_budget(x, s, R * M, budget)


def _fill_by_tokens(_x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> Labels | None:
    return lpt_budget(s.astype(np.float64), s, R * M, budget)


def _fill_by_fit(_x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> Labels | None:
    return best_fit(s, R * M, budget)


def fill_columns(x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> Labels | None:
    """Columns whose level a large item sets are filled one by one, the others together by LPT.

    A column must leave no more tokens than the later ones can well hold: its level rises until
    that is so.
    """
    labels = np.full(len(x), -1, dtype=np.int64)
    left = np.arange(len(x))
    column = 0
    while column < M - 1 and len(left):
        share = float(x[left].sum()) / (R * (M - column))
        if x[left[0]] <= share:
            break
        leave = int(WELL_FILLED * R * (M - column - 1) * budget)
        chosen = _Column(x[left], s[left], R, budget).fill(float(x[left[0]]), leave)
        labels[left] = np.where(chosen >= 0, chosen + column * R, -1)
        left = left[chosen < 0]
        column += 1
    rest = lpt_budget(x[left], s[left], R * (M - column), budget)
    if rest is None:
        return None
    labels[left] = rest + column * R
    return labels


class _Column:
    """R bins of one micro-step, filled to a level from the dear end of the items.

    The least loaded bin takes the largest item left that keeps it within level and budget: dear
    items need few tokens for their cost.
    """

    def __init__(self, x: FloatArray, s: IntArray, R: int, budget: int) -> None:
        self.cost, self.tokens = x.tolist(), s.tolist()
        self.falling_cost, self.falling_tokens = (-x).tolist(), (-s).tolist()
        self.after = list(range(len(x) + 1))  # leads to the first unused item at or after i
        self.labels = [-1] * len(x)
        self.budget, self.room = budget, [budget] * R
        self.held = int(s.sum())

    def fill(self, level: float, leave: int) -> Labels:
        """The bin of each item, or -1 for what stays, if possible at most `leave` tokens."""
        loads = [(0.0, b) for b in range(len(self.room))]
        cheapest = self.cost[-1] / max(self.tokens[-1], 1)
        for _ in range(_RISES):
            loads = self._fill_to(level, loads)
            if self.held <= leave or not loads:
                break
            level += (self.held - leave) * cheapest / len(loads)
        return np.array(self.labels, dtype=np.int64)

    def _fill_to(self, level: float, heap: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """Take items until none fits any bin; the loads of bins that a higher level would open."""
        n, top = len(self.cost), level * (1 + 1e-12)
        closed = []
        while heap:
            load, b = heap[0]
            room = self.room[b]
            i = bisect_left(self.falling_cost, load - top)
            if room < self.budget:
                i = max(i, bisect_left(self.falling_tokens, -room))
            i = self._unused(i)
            if i == n:
                closed.append(heapq.heappop(heap))
                continue
            self.labels[i] = b
            self.after[i] = i + 1
            self.room[b] = max(room - self.tokens[i], 0)
            self.held -= self.tokens[i]
            heapq.heapreplace(heap, (load + self.cost[i], b))
        return [entry for entry in closed if self.room[entry[1]] >= self.tokens[-1]]

    def _unused(self, i: int) -> int:
        after = self.after
        while after[i] != i:
            after[i] = i = after[after[i]]
        return i


def lpt_budget(x: FloatArray, s: IntArray, bins: int, budget: int) -> Labels | None:
    """LPT on `x` into bins of at most `budget` tokens; None when an item finds no room.

    A bin without room for an item is parked until items are small enough for it.
    """
    if len(x) > CHUNKED_FROM and bins >= 32:
        labels = _lpt_budget_chunked(x, s, bins, budget)
        if labels is not None:
            return labels
    return _lpt_budget_one_by_one(x, s, bins, budget)


def _lpt_budget_chunked(x: FloatArray, s: IntArray, bins: int, budget: int) -> Labels | None:
    """LPT where each round gives the least loaded half of the bins that have room one item."""
    loads, room = np.zeros(bins), np.full(bins, budget)
    labels = np.empty(len(x), dtype=np.int64)
    done = 0
    while done < len(x):
        fits = np.flatnonzero((room >= s[done]) | (room == budget))
        take = min(bins // 2, len(x) - done, len(fits))
        if not take:
            return None
        target = fits[np.argsort(loads[fits], kind="stable")[:take]]
        labels[done : done + take] = target
        loads[target] += x[done : done + take]
        room[target] = np.maximum(room[target] - s[done : done + take], 0)
        done += take
    return labels


def _lpt_budget_one_by_one(x: FloatArray, s: IntArray, bins: int, budget: int) -> Labels | None:
    heap = [(0.0, b) for b in range(bins)]
    parked: list[tuple[int, float, int]] = []
    room = [budget] * bins
    placed = []
    for cost, tokens in zip(x.tolist(), s.tolist(), strict=True):
        while parked and -parked[0][0] >= tokens:
            _, load, b = heapq.heappop(parked)
            heapq.heappush(heap, (load, b))
        while heap and not _fits(room[heap[0][1]], tokens, budget):
            load, b = heapq.heappop(heap)
            heapq.heappush(parked, (-room[b], load, b))
        if not heap:
            return None
        load, b = heap[0]
        room[b] -= tokens
        placed.append(b)
        heapq.heapreplace(heap, (load + cost, b))
    return np.array(placed, dtype=np.int64)


def _fits(room: int, tokens: int, budget: int) -> bool:
    """Room enough, or an item over the budget that has an empty bin to itself."""
    return tokens <= room or (tokens > budget and room == budget)


def best_fit(s: IntArray, bins: int, budget: int) -> Labels | None:
    """Best fit decreasing: each item where it leaves the least room; None when one finds none."""
    open_bins = [(budget, b) for b in range(bins)]
    labels = []
    for tokens in s.tolist():
        at = bisect_left(open_bins, (min(tokens, budget), -1))
        if at == len(open_bins) or (tokens > budget and open_bins[-1][0] < budget):
            return None
        room, b = open_bins.pop(at if tokens <= budget else -1)
        labels.append(b)
        insort(open_bins, (max(room - tokens, 0), b))
    return np.array(labels, dtype=np.int64)


def level_columns(
    labels: Labels, x: FloatArray, s: IntArray, *, R: int, M: int, budget: int
) -> Labels:
    """Sort bins by cost, cut them into columns of R, swap inside columns."""
    bins = R * M
    load = np.bincount(labels, weights=x, minlength=bins)
    rank = np.empty(bins, dtype=np.int64)
    rank[np.argsort(-load, kind="stable")] = np.arange(bins)
    labels = rank[labels]
    ids = members(labels, bins).reshape(M, R, -1)
    swap_level(ids, np.append(x, 0.0), np.append(s, 0), budget)
    swapped = np.empty(len(x) + 1, dtype=np.int64)
    swapped[ids] = np.arange(bins).reshape(M, R, 1)
    return swapped[:-1]


def members(labels: Labels, bins: int) -> IntArray:
    """Items of each bin as rows [bins, slots], padded with len(labels); a free slot in each."""
    counts = np.bincount(labels, minlength=bins)
    ids = np.full((bins, int(counts.max(initial=0)) + 1), len(labels), dtype=np.int64)
    order = np.argsort(labels, kind="stable")
    ids[labels[order], np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)] = (
        order
    )
    return ids


def next_fit(ranks: list[IntArray], s: IntArray, budget: int) -> list[list[IntArray]]:
    """Cut each rank's items, in their order, into runs that keep the budget."""
    return [_runs(items, np.cumsum(s[items]).tolist(), budget) for items in ranks]


def _runs(items: IntArray, held: list[int], budget: int) -> list[IntArray]:
    runs = []
    start, before = 0, 0
    while start < len(held):
        end = max(bisect_right(held, before + budget), start + 1)
        runs.append(items[start:end])
        start, before = end, held[end - 1]
    return runs


def first_fit(ranks: list[IntArray], s: IntArray, budget: int) -> list[list[IntArray]]:
    """Pack each rank's items, in their order, into the first micro-batch that has room."""
    return [_first_fit(items, s[items].tolist(), budget) for items in ranks]


def _first_fit(items: IntArray, tokens: list[int], budget: int) -> list[IntArray]:
    rooms: list[int] = []
    bins: list[list[int]] = []
    for item, count in zip(items.tolist(), tokens, strict=True):
        b = next((b for b, room in enumerate(rooms) if count <= room), len(rooms))
        if b == len(rooms):
            rooms.append(budget)
            bins.append([])
        rooms[b] -= min(count, rooms[b])
        bins[b].append(item)
    return [np.array(members, dtype=np.int64) for members in bins]
