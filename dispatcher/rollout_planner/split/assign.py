"""Items into bins, bins onto ranks, and swaps that level what each has.

Invariant: each item is in exactly one bin, which holds at most its cap, in items or in tokens, or a
single item that alone exceeds it. Items descend in cost, and mostly in tokens: of whole groups the
dearest need not have most. No swap raises the largest load of a row of bins, or breaks a cap.

One item after the other goes to the least loaded bin (LPT, Graham 1969) or where it leaves the
least room (best fit). Example, budget 10, 2 bins, items of 7, 6, 4, 3 tokens: least loaded first
puts 4 to the 6 and 3 to the 7; items of 6, 5, 5, 4 end as 6 4 | 5 5 by best fit. Swaps make of bins
5 4 and 3 2 of one row 5 2 and 4 3.

Where ranks wait at every micro-step, micro-batches of one index should cost the same, so
neighbours share a column. Example, R = 2, one each: 9 8 2 1 in columns is 9 8 | 2 1: waits 1 + 1;
equal sums would be 9 1 | 8 2, whose micro-steps wait 1 + 1 as well, but 9 1 | 2 8 would wait 7 + 7.

A rank that is a pipeline of several stages takes the sum of its micro-batches, and its largest once
more for each further stage: while a pipeline fills and drains, each stage beyond the first waits
for it. So a rank that has a large micro-batch should have less besides. Two ways are compared,
ranks of equal sums and LPT where a rank's first micro-batch counts for every stage; swaps between
the slowest rank and the fastest ones end it, and it takes no longer than what it starts from.
Example, R = 2, M = 2, 4 stages, costs 9 4 4 2: equal sums, 9 2 | 4 4, take 11 + 27 and 8 + 12; no
swap helps, as whoever has the 9 takes 9 * 4 and its smallest company.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import by_label, falling_place
from rollout_planner.split.karmarkar_karp import differencing_labels
from rollout_planner.types import BoolArray, FloatArray, IntArray, Sync, cut, round_up, step_time

#: The bin of each item.
Labels = IntArray


def lpt(x: FloatArray, bins: int, cap: int, start: FloatArray | None = None) -> Labels:
    """The least loaded bin that has fewer than `cap` items, for each of falling `x`.

    start: what each bin counts as loaded with before, float64[bins].
    """
    labels = lpt_budget(x, np.ones(len(x), dtype=np.int64), bins, cap, start=start)
    assert labels is not None, f"{len(x)} items do not fit into {bins} bins of {cap}"
    return labels


def lpt_budget(
    x: FloatArray,
    s: IntArray,
    bins: int,
    budget: int,
    *,
    start: FloatArray | None = None,
    slowness: tuple[float, ...] | None = None,
) -> Labels | None:
    """The same for bins of at most `budget` tokens; None when an item finds no room.

    slowness: of each bin: an item goes to the one that would be done with it first.
    """
    kinds = [Kind()] * bins if slowness is None else list(map(Kind, slowness))
    labels = put(x, np.minimum(s, budget), [budget] * bins, kinds, start)
    return None if labels.min(initial=0) < 0 else labels


def fill_sets(
    x: FloatArray,
    s: IntArray,
    of: IntArray,
    bins: int,
    budget: int,
    *,
    start: FloatArray | None = None,
    slowness: tuple[float, ...] | None = None,
    tightly: bool = True,
) -> Labels:
    """The same of each set of items by itself, or else tightly; -1 where an item finds no room.

    of: set of each item, as its rank. Tightly is by Karmarkar-Karp of the tokens, or by best fit.
    """
    labels = np.full(len(x), -1)
    for each in _sets(of):
        own, found = (
            each,
            lpt_budget(x[each], s[each], bins, budget, start=start, slowness=slowness),
        )
        if found is None and tightly:
            own = each[np.argsort(-s[each], kind="stable")]
            found = differencing_labels(s[own], bins, equal_size=False)
            if np.bincount(found, s[own]).max() > budget:
                found = best_fit(s[own], np.full(bins, budget), budget)
        labels[own] = -1 if found is None else found
    return labels


def kk_sets(x: FloatArray, s: IntArray, of: IntArray, bins: int, budget: int) -> Labels:
    """Bin of each item, each set by Karmarkar-Karp; -1 for those of a set that finds no room so.

    An item of the whole budget goes alone.
    """
    labels = np.full(len(x), -1)
    for own in _sets(of):
        found = differencing_labels(x[own], bins, equal_size=False)
        if np.bincount(found, s[own]).max(initial=0) <= budget:
            labels[own] = found
    return labels


def _sets(of: IntArray) -> list[IntArray]:
    """Items of each set."""
    return cut(by_label(of, int(of.max()) + 1), np.bincount(of).tolist())


class Kind(NamedTuple):
    """What bins have in common. slow: time that a unit of cost takes.

    An item is padded to a multiple of `pieces`, and has `longest` tokens at most.
    """

    slow: float = 1.0
    pieces: int = 1
    longest: float = np.inf


def put(
    x: FloatArray,
    s: IntArray,
    room: list[int],
    kinds: Sequence[Kind],
    start: FloatArray | None = None,
) -> Labels:
    """The bin that would be done first with each item, one after the other; -1: no room.

    room: tokens that each bin takes. Bins of a kind have a heap together, by load, and of each heap
    only the least loaded is asked. One without room is parked until items are small enough for it.
    """
    heaps: dict[Kind, list[tuple[float, int]]] = {}
    loads = [0.0] * len(room) if start is None else start.tolist()
    for b, kind in enumerate(kinds):
        heappush(heaps.setdefault(kind, []), (loads[b], b))
    of_kinds = [(*kind, heap) for kind, heap in heaps.items()]
    parked, labels = list[tuple[int, int, float, list[tuple[float, int]]]](), list[int]()
    for cost, tokens in zip(x.tolist(), s.tolist(), strict=True):
        while parked and -parked[0][0] >= tokens:
            _, b, load, heap = heappop(parked)
            heappush(heap, (load, b))
        best, soonest, load, taken = None, np.inf, 0.0, 0
        for slow, pieces, longest, heap in of_kinds:
            if tokens > longest:
                continue
            work, needed = cost, tokens
            if pieces > 1:
                needed = round_up(tokens, pieces)
                work = cost * needed / tokens
            while heap and room[heap[0][1]] < needed:
                least, b = heappop(heap)
                heappush(parked, (-room[b], b, least, heap))
            if heap and (heap[0][0] + work) * slow < soonest:
                best, load, taken = heap, heap[0][0] + work, needed
                soonest = load * slow
        if best is not None:
            b = best[0][1]
            room[b] -= taken
            heapreplace(best, (load, b))
        labels.append(-1 if best is None else b)
    return np.array(labels, dtype=np.int64)


def best_fit(s: IntArray, room: IntArray, budget: int) -> Labels:
    """Each item of falling `s` into the bin where it leaves the least room; -1 if it fits nowhere.

    room: int64[bins], tokens that each bin still takes; an item above the budget needs all of it.
    A bin is one integer, its room above its number, as comparing these is fastest. Only bins that
    are in use and have room for the smallest item are searched.
    """
    if not (len(s) and len(room)):
        return np.full(len(s), -1)
    tokens = np.minimum(s, budget).tolist()
    smallest, bits = tokens[-1], len(room).bit_length()
    used = np.flatnonzero((room < budget) & (room >= smallest))
    open_bins = np.sort((room[used] << bits) | used).tolist()
    unused = iter(np.flatnonzero(room == budget).tolist())
    labels, low = [], (1 << bits) - 1
    for needed in tokens:
        at = bisect_left(open_bins, needed << bits)
        if at < len(open_bins):
            found = open_bins.pop(at)
            b, left = found & low, (found >> bits) - needed
        else:
            b, left = next(unused, -1), budget - needed
        labels.append(b)
        if left >= smallest and b >= 0:
            insort(open_bins, (left << bits) | b)
    return np.array(labels, dtype=np.int64)


def first_fit(s: IntArray, opened: IntArray) -> Labels:
    """Each item into the first bin that has room. opened: room of a bin that begins with it."""
    room, labels = list[int](), list[int]()
    for tokens, most in zip(s.tolist(), opened.tolist(), strict=True):
        b = next((b for b, left in enumerate(room) if left >= tokens), len(room))
        room += [most] if b == len(room) else []
        room[b] -= tokens
        labels.append(b)
    return np.array(labels, dtype=np.int64)


def num_bins(labels: Labels) -> int:
    """Bins of a packing numbered from 0."""
    return int(labels.max(initial=-1)) + 1


def spread_columns(cost: FloatArray) -> IntArray:
    """Which rank takes each bin, int64[M, R] from cost[M, R], so that ranks' sums come close.

    Columns by falling spread: the dearest bin goes to the least loaded rank, and so on.
    """
    M = len(cost)
    if M == 1:
        return falling_place(cost[0])[None]
    dearest_first = np.argsort(-cost, axis=1, kind="stable")
    falls = np.take_along_axis(cost, dearest_first, axis=1)
    ranks, loads = np.empty(cost.shape, dtype=np.int64), np.zeros(cost.shape[1])
    for j in (falls[:, -1] - falls[:, 0]).argsort(kind="stable"):
        least_loaded = loads.argsort(kind="stable")
        ranks[j, dearest_first[j]] = least_loaded
        loads[least_loaded] += falls[j]
    return ranks


def swap_level(
    ids: IntArray,
    x: FloatArray,
    s: IntArray | None = None,
    budget: int = 0,
    *,
    parts: int = 1,
    base: FloatArray | None = None,
    stages: int = 1,
    enough: float = tuning.TOLERANCE,
) -> None:
    """Level the loads of bins within each row by pairwise swaps, in place.

    ids: int64[rows, bins, slots] into `x` (and `s`, the tokens, where `budget` caps a bin), whose
    last entry is the empty slot: it costs nothing, so that swapping with it is a move.
    parts: equal parts of a bin's slots, each with the budget to itself: a rank's micro-batches.
    base: float64[rows, bins], what each bin counts as loaded with beside its items: bins that
    should cost less than others have more. stages: bins are ranks, and their slots micro-batches,
    the largest of which counts once more for each further stage.
    Each round pairs the i-th most with the i-th least loaded bin of a row and makes, in every
    pair, the one swap that comes closest to levelling it. Rows that are level, or whose most
    loaded bin nobody can help, are left alone; all ends when the largest loads are within
    `enough` of the mean.
    """
    rows, bins, slots = ids.shape
    half, looked_at = bins // 2, np.arange(min(slots, tuning.SWAP_SLOTS))
    stride = tuning.SWAP_SLOTS // 2 - 1  # odd, so that it meets all slots of as many
    if not half:
        return
    held = _Held(ids.reshape(-1, slots), x, stages - 1)
    if s is not None:
        held.limit(s, budget, parts)
    beside = np.zeros((rows, bins)) if base is None else base
    stalled, first = np.zeros(rows, dtype=np.int64), np.arange(rows)[:, None] * bins
    for turn in range(tuning.ROUNDS):
        loads = held.loads().reshape(rows, bins) + beside
        mean = loads.sum(axis=1) / bins
        over = loads.max(axis=1) - mean
        uneven = (over > mean * min(tuning.TOLERANCE, enough)) & (stalled <= 1)
        if over[uneven].sum() <= enough * mean.sum():
            break
        order, level = loads[uneven].argsort(axis=1, kind="stable"), mean[uneven, None]
        order += first[uneven]
        moved_on = (np.arange(half) - stalled[uneven, None]) % half
        high, low = order[:, : -half - 1 : -1], np.take_along_axis(order[:, :half], moved_on, 1)
        dear = loads.ravel()[high]
        gap = (dear - loads.ravel()[low]) / 2
        worth = (dear > level) & (gap > level * (tuning.TOLERANCE / 2))
        one, other = (
            (looked_at * slots // len(looked_at) + at * stride) % slots for at in (turn, turn + 1)
        )
        gains = np.zeros(high.shape, dtype=bool)
        gains[worth] = held.swap((high[worth], one), (low[worth], other), gap[worth])
        stalled[uneven] = np.where(gains[:, 0], 0, stalled[uneven] + 1)
    ids[...] = held.ids.reshape(ids.shape)


def levelled(
    labels: Labels,
    x: FloatArray,
    bins: int,
    s: IntArray | None = None,
    budget: int = 0,
    *,
    rows: int = 1,
    parts: int = 1,
    base: FloatArray | None = None,
    enough: float = tuning.TOLERANCE,
) -> Labels:
    """Bin of each item after `swap_level`, in rows of neighbouring bins, each of so many parts.

    Left as they are where one bin has so many more items that most slots would be empty.
    """
    if bins * int(np.bincount(labels).max(initial=0)) > tuning.TOO_MANY_SLOTS:
        return labels
    ids = members(labels, bins).reshape(rows, bins // rows // parts, -1)
    tokens = None if s is None else np.append(s, 0)
    swap_level(ids, np.append(x, 0.0), tokens, budget, parts=parts, base=base, enough=enough)
    found = np.empty(len(labels) + 1, dtype=np.int64)
    found[ids.reshape(bins, -1)] = np.arange(bins)[:, None]
    return found[:-1]


def members(labels: Labels, bins: int) -> IntArray:
    """Items of each bin as rows [bins, slots], padded with len(labels); a free slot in each."""
    counts = np.bincount(labels, minlength=bins)
    slots = int(counts.max(initial=0)) + 1
    ids = np.full((bins, slots), len(labels), dtype=np.int64)
    first = np.arange(0, bins * slots, slots) - counts.cumsum() + counts
    ids.ravel()[first.repeat(counts) + np.arange(len(labels))] = by_label(labels, bins)
    return ids


#: Bins, and slots of each that are looked at.
_Some = tuple[IntArray, IntArray]


class _Held:
    """What the slots of each bin hold: items, their cost, and, under a budget, their tokens.

    further: how often the dearest item of a bin counts once more.
    """

    def __init__(self, ids: IntArray, x: FloatArray, further: int) -> None:
        self.ids, self.cost, self.further = ids, x[ids], further
        self.room: IntArray | None = None

    def limit(self, s: IntArray, budget: int, parts: int) -> None:
        """Each of so many equal parts of a bin's slots has room for so many tokens."""
        self.tokens, self.of_part = s[self.ids], np.arange(self.ids.shape[1]) * parts
        self.of_part //= self.ids.shape[1]
        self.room = budget - self.tokens.reshape(len(self.ids), parts, -1).sum(axis=2)

    def loads(self) -> FloatArray:
        """What each bin takes."""
        loads: FloatArray = self.cost.sum(axis=1)
        return loads + self.further * self.cost.max(axis=1) if self.further else loads

    def swap(self, high: _Some, low: _Some, gap: FloatArray) -> BoolArray:
        """Make the best swap of each pair of bins that gains by one; which pairs do.

        gap: what has to go from the one to the other to make them equal.
        """
        given, taken = self.cost[high[0][:, None], high[1]], self.cost[low[0][:, None], low[1]]
        more = given[:, :, None] - taken[:, None]
        error = np.abs(more - gap[:, None, None])
        if self.further:  # by how much the slower of both then takes longer than their mean
            one: FloatArray = np.maximum(self._others(high)[:, :, None], taken[:, None])
            other: FloatArray = np.maximum(self._others(low)[:, None], given[:, :, None])
            one = one * self.further + self.cost[high[0]].sum(axis=1)[:, None, None] - more
            other = other * self.further + self.cost[low[0]].sum(axis=1)[:, None, None] + more
            error = np.maximum(one, other) - (self.loads()[high[0]] - gap)[:, None, None]
        if self.room is not None:
            gives = self.tokens[high[0][:, None], high[1]][:, :, None]
            takes = self.tokens[low[0][:, None], low[1]][:, None]
            here = self.room[high[0][:, None], self.of_part[high[1]]][:, :, None]
            there = self.room[low[0][:, None], self.of_part[low[1]]][:, None]
            error[(gives - takes > there) | (takes - gives > here)] = np.inf
        error = error.reshape(len(gap), error.shape[1] * error.shape[2])
        best = error.argmin(axis=1)
        gain: BoolArray = error[np.arange(len(gap)), best] < gap * (1 - tuning.ROUNDING)
        i, j = np.divmod(best[gain], len(low[1]))
        mine, theirs = (high[0][gain], high[1][i]), (low[0][gain], low[1][j])
        if self.room is not None:
            tokens = self.tokens[mine] - self.tokens[theirs]
            self.room[mine[0], self.of_part[mine[1]]] += tokens
            self.room[theirs[0], self.of_part[theirs[1]]] -= tokens
            self.tokens[mine], self.tokens[theirs] = self.tokens[theirs], self.tokens[mine]
        for of in (self.ids, self.cost):
            of[mine], of[theirs] = of[theirs], of[mine]
        return gain

    def _others(self, some: _Some) -> FloatArray:
        """The dearest item of each bin without the one in each of these slots."""
        cost = self.cost[some[0]]
        first, second = (-cost).argsort(axis=1, kind="stable")[:, :2, None].transpose(1, 0, 2)
        others: FloatArray = np.take_along_axis(cost, np.where(some[1] == first, second, first), 1)
        return others


def bins_onto_ranks(load: FloatArray, R: int, M: int, stages: int = 1) -> IntArray:
    """Place, rank * M + micro-step, of each of R*M bins of float64[R*M] cost, M to each rank.

    Ranks of nearly equal sums; of pipelines those that take as little time as can be.
    """
    falling = np.argsort(-load, kind="stable")
    ids, x = np.arange(R)[:, None], load[falling]
    if M > 1:
        ids = by_label(lpt(x, R, M), R).reshape(R, M)
        swap_level(ids[None], x)
        ids.sort(axis=1)
    if stages > 1 and M > 1:
        labels = np.append(np.arange(R), lpt(x[R:], R, M - 1, start=stages * x[:R]))
        dealt = by_label(labels, R).reshape(R, M)
        ids = min((ids, dealt), key=lambda found: step_time(x[found], Sync.STEP, stages))
        swap_level(ids[None], x, stages=stages)
    place = np.empty(R * M, dtype=np.int64)
    place[falling[ids.ravel()]] = np.arange(R * M)
    return place


def levels(x: FloatArray, R: int, M: int, company: float = 0.0) -> FloatArray:
    """What each of M micro-steps should cost a rank, descending, so that they sum to the least.

    A micro-step costs at least its largest sample and the `company` that this sample must have;
    what is left is spread evenly over the micro-steps that follow.
    Example: x = [10, 4, 4, 2], R = 2, M = 2: the first costs 10, so 0 is left for the second,
    which still holds a 4: levels [10, 4].
    """
    left = float(x.sum())
    out = np.empty(M)
    for j in range(M):
        largest = float(x[j * R]) + company if j * R < len(x) else 0.0
        out[j] = max(largest, left / (R * (M - j)))
        left = max(left - R * out[j], 0.0)
    return out


def places_of(load: FloatArray, R: int, M: int, per_step: bool, stages: int = 1) -> IntArray:
    """Give each of R*M micro-batches of this cost its rank and micro-step, rank * M + micro-step.

    Ranks of equal sums, or like with like.
    """
    if per_step:
        return bins_onto_ranks(load, R, M, stages)
    place, by_cost = np.empty(R * M, dtype=np.int64), np.argsort(-load, kind="stable")
    rank_of = spread_columns(load[by_cost].reshape(M, R))
    place[by_cost] = (rank_of * M + np.arange(M)[:, None]).ravel()
    return place


def rows_of_neighbours(x: FloatArray, R: int, M: int, each: int) -> IntArray:
    """Bin of each of falling `x`, of M columns of R, with room for `each`.

    Column j holds neighbours; in it, each row of R goes largest onto least loaded.
    """
    costs = np.append(x, np.zeros(R * M * each - len(x))).reshape(M, each, R)
    labels, column = np.empty(costs.shape, dtype=np.int64), np.arange(M)[:, None]
    loads = np.zeros((M, R))
    for t in range(each):
        order = loads.argsort(axis=1, kind="stable")
        labels[:, t] = order + column * R
        loads[column, order] += costs[:, t]
    return labels.ravel()[: len(x)]
