"""Greedy assignment and levelling swaps: the moves that every partition is made of.

Invariant: each item stays in exactly one slot; no step raises the largest load of a row of bins
or takes a bin beyond its count or token cap.

LPT is Graham 1969: largest item first, always into the least loaded bin. Example: [5, 4, 3, 3]
into 2 bins with caps of 2: 5 | 4, 3 joins 4, the last 3 joins 5: sums 8 and 7.
"""

from functools import cached_property
from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.order import as_whole, falling_place
from rollout_dispatcher.plan import BoolArray, FloatArray, IntArray


def lpt(x: FloatArray, bins: int, cap: int, start: FloatArray | None = None) -> IntArray:
    """Bin of each item of `x` (descending), at most `cap` items a bin, loads from `start`."""
    loads = np.zeros(bins) if start is None else start
    if len(x) > tuning.CHUNKED_FROM and bins >= tuning.CHUNKED_BINS:
        return _lpt_chunked(x, loads, cap)
    return lpt_one_by_one(x, loads, cap)


def lpt_one_by_one(x: FloatArray, start: FloatArray, cap: int) -> IntArray:
    """As `lpt`, and never by chunks; one bin for each load in `start`."""
    heap = [(load, b) for b, load in enumerate(start.tolist())]
    heapify(heap)
    room = [cap] * len(start)
    labels = []
    for cost in x.tolist():
        load, b = heap[0]
        labels.append(b)
        room[b] -= 1
        if room[b]:
            heapreplace(heap, (load + cost, b))
        else:
            heappop(heap)
    return np.array(labels, dtype=np.int64)


def _lpt_chunked(x: FloatArray, start: FloatArray, cap: int) -> IntArray:
    """LPT where each round gives the less loaded of the open bins one item each."""
    loads = start.astype(np.float64)
    bins, n = len(loads), len(x)
    room, open_bins = np.full(bins, cap), bins
    labels = np.empty(n, dtype=np.int64)
    done = turn = 0
    while done < n:
        take = min(max(bins // 2, 1), n - done, open_bins)
        target = loads.argsort(kind="stable")[:take]
        labels[done : done + take] = target
        loads[target] += x[done : done + take]
        room[target] -= 1
        done += take
        turn += 1
        if turn >= cap:  # before that no bin can be full
            full = target[room[target] == 0]
            loads[full] = np.inf
            open_bins -= len(full)
    return labels


def spread_columns(cost: FloatArray) -> IntArray:
    """Which rank takes each bin, int64[M, R] from cost[M, R], so that ranks' sums come close.

    Columns by falling spread: the dearest bin goes to the least loaded rank, and so on. Past the
    first columns, where spreads are small, the order just turns around each time.
    """
    M = len(cost)
    if M == 1:
        return falling_place(cost[0])[None]
    rows, dearest_first = np.arange(M)[:, None], np.argsort(-cost, axis=1, kind="stable")
    ranks = np.empty(cost.shape, dtype=np.int64)
    ranks[rows, dearest_first] = spread_falling(cost[rows, dearest_first])
    return ranks


def spread_falling(cost: FloatArray) -> IntArray:
    """The same where columns fall, and there are some.

    A rank is one number, its load above its own, as sorting these is fastest.
    """
    R = cost.shape[1]
    bits = R.bit_length()
    by_spread = (cost[:, -1] - cost[:, 0]).argsort(kind="stable")
    dealt, turned = by_spread[: tuning.DEALT_BY_LOAD], by_spread[tuning.DEALT_BY_LOAD :]
    costs = as_whole(cost, 2.0 ** (62 - bits)).astype(np.int64) << bits
    loads = np.empty((len(dealt), R), dtype=np.int64)
    loads[0], loads[1:] = np.arange(R), costs[dealt[:-1]]
    before = loads[0]
    for after in loads[1:]:
        np.add(after, before, after)
        after.sort()
        before = after
    loads &= (1 << bits) - 1
    orders = np.empty(cost.shape, dtype=np.int64)
    orders[dealt] = loads
    orders[turned[::2]] = loads[-1, ::-1]
    orders[turned[1::2]] = loads[-1]
    return orders


def swap_level(
    ids: IntArray,
    x: FloatArray,
    s: IntArray | None = None,
    budget: int = 0,
    *,
    parts: int = 1,
    base: FloatArray | None = None,
    enough: float = tuning.TOLERANCE,
    rounds: int = 16,
) -> None:
    """Level the loads of bins within each row by pairwise swaps, in place.

    ids: int64[rows, bins, slots] into `x` (and `s`, the tokens, where `budget` caps a bin), whose
    last entry is the empty slot: it costs nothing, so that swapping with it is a move.
    parts: equal parts of a bin's slots, each with the budget to itself: a rank's micro-batches.
    base: float64[rows, bins], what each bin counts as loaded with beside its items: bins that
    should cost less than others have more.
    Each round pairs the i-th most with the i-th least loaded bin of a row and makes, in every
    pair, the one swap that comes closest to levelling it. Rows that are level, or whose most
    loaded bin nobody can help, are left alone; all ends when the largest loads are within
    `enough` of the mean.
    """
    rows, bins, slots = ids.shape
    if bins < 2:
        return
    held = _Held(ids, x, s, budget, parts)
    stalled = np.zeros(rows, dtype=np.int64)
    patience = tuning.OTHER_PAIRINGS if s is None else tuning.OTHER_PAIRINGS_IN_BUDGET
    # Of a row: swaps do not change it.
    mean = held.costs.reshape(rows, -1).sum(axis=1)
    mean = (mean if base is None else mean + base.sum(axis=1)) / bins
    level, waits = mean * min(tuning.TOLERANCE, enough), enough * float(mean.sum())
    whole, sampled, any_stalled = np.arange(slots), slots > tuning.SWAP_SLOTS, False
    loads = np.zeros((rows, bins))
    all_loads = loads.ravel()
    beside = None if base is None else base.reshape(-1)
    changed: IntArray | None = None
    for turn in range(rounds):
        held.sum_up(all_loads, beside, changed)
        over = np.maximum.reduce(loads, axis=1) - mean
        uneven = over > level
        if any_stalled:
            uneven &= stalled <= patience
        rows_left = uneven.nonzero()[0]
        if float(np.add.reduce(over.take(rows_left))) <= waits:
            break
        high, low, gap, top = _pairs(loads, mean, rows_left, stalled if any_stalled else None)
        u, v = (_slots(slots, turn), _slots(slots, turn + 1)) if sampled else (whole, whole)
        gain = held.swap((high, u), (low, v), gap)
        helped = gain[top]
        if any_stalled or not all(helped.tolist()):
            any_stalled = _count_stalled(stalled, high[top] // bins, helped)
        if held.is_large:
            changed = np.concatenate((high[gain], low[gain]))
    ids[...] = held.flat.reshape(ids.shape)


def _count_stalled(stalled: IntArray, rows: IntArray, helped: BoolArray) -> bool:
    """Count how often the top pairs of these rows gained nothing; whether any has."""
    if len(stalled) == 1:
        for gained in helped.tolist():
            stalled[0] = 0 if gained else stalled[0] + 1
        return bool(stalled[0])
    stalled[rows] = np.where(helped, 0, stalled[rows] + 1)
    return bool(np.logical_or.reduce(stalled))


#: Bins, and slots of each that are looked at.
_Some = tuple[IntArray, IntArray]


class _Held:
    """What bins hold: `flat`, the item in each slot, and `costs`; bins count through all rows."""

    def __init__(
        self, ids: IntArray, x: FloatArray, s: IntArray | None, budget: int, parts: int
    ) -> None:
        self.s, self.budget, self.slots = s, budget, ids.shape[2]
        self.part = self.slots // parts
        self.flat = ids.reshape(-1)
        self.costs = x[self.flat]
        self.cost = self.costs.reshape(-1, self.slots)
        self.every = np.arange(len(self.cost))
        self.is_large = len(self.flat) > tuning.MANY_SLOTS

    @cached_property
    def tokens(self) -> IntArray:
        """Of the item in each slot, once asked for and from then on."""
        assert self.s is not None, "there is no budget"
        tokens: IntArray = self.s[self.flat]
        return tokens

    @cached_property
    def room(self) -> IntArray:
        """Tokens that each part of a bin still takes, likewise."""
        room: IntArray = self.budget - np.add.reduce(self.tokens.reshape(-1, self.part), axis=1)
        return room

    @cached_property
    def is_tight(self) -> bool:
        """Whether budgets stand in the way: so it is thought at first, and set once one does."""
        if self.s is None:
            return False
        least, items = int(np.minimum.reduce(self.room)), len(self.s) - 1
        return bool(least * items < tuning.FULL_BIN * int(np.add.reduce(self.s)))

    def sum_up(
        self, loads: FloatArray, beside: FloatArray | None, changed: IntArray | None
    ) -> None:
        """Loads of all bins, or of those that changed, in place."""
        if changed is not None:
            held = np.add.reduce(self.cost[changed], axis=1)
            loads[changed] = held if beside is None else held + beside[changed]
            return
        np.add.reduce(self.cost, axis=1, out=loads)
        if beside is not None:
            loads += beside

    def swap(self, high: _Some, low: _Some, gap: FloatArray) -> BoolArray:
        """Make the best swap of each pair of bins that gains by one; which pairs do."""
        error = self._errors(high, low, gap)
        if self.is_tight:
            np.putmask(error, self._all_too_much(high, low), np.inf)
        gap = gap * (1 - 1e-9)
        while True:
            best = error.argmin(axis=1)
            gain: BoolArray = error[self.every[: len(best)], best] < gap
            to, source = self._moves(best, gain.nonzero()[0], high, low)
            if self.s is None:
                break
            comes, parts = self.tokens[source], to // self.part
            more = comes - self.tokens[to]
            if self.is_tight or not np.count_nonzero(more > self.room[parts]):
                self.tokens[to] = comes
                self.room[parts] -= more
                break
            self.is_tight = True
            np.putmask(error, self._all_too_much(high, low), np.inf)
        self.flat[to], self.costs[to] = self.flat[source], self.costs[source]
        return gain

    def _errors(self, high: _Some, low: _Some, gap: FloatArray) -> FloatArray:
        """How far from level each swap leaves its pair: [pair, slot of the one and the other]."""
        given = _at(self.cost, *high)
        given = given - gap[:, None]
        error: FloatArray = given[:, :, None] - _at(self.cost, *low)[:, None, :]
        np.abs(error, out=error)
        return error.reshape(len(error), -1)

    def _moves(
        self, best: IntArray, pairs: IntArray, high: _Some, low: _Some
    ) -> tuple[IntArray, IntArray]:
        """Slots in `flat` of both that some pairs swap, and whence what they get; best: where that
        is in all their swaps.
        """
        width, best = len(low[1]), best[pairs]
        i, j = np.divmod(best, width)
        if width < self.slots:
            i, j = high[1][i], low[1][j]
        one, other = high[0][pairs] * self.slots + i, low[0][pairs] * self.slots + j
        return np.concatenate((one, other)), np.concatenate((other, one))

    def _all_too_much(self, high: _Some, low: _Some) -> BoolArray:
        """Whether one of two bins has no room for what it gets, in each swap of their slots:
        [pair, slot of the one and the other].
        """
        tokens, room = self.tokens.reshape(self.cost.shape), self.room.reshape(len(self.cost), -1)
        given, taken = _at(tokens, *high), _at(tokens, *low)
        here, there = room[high[0]], room[low[0]]
        if room.shape[1] > 1:
            here, there = here[:, high[1] // self.part], there[:, low[1] // self.part]
        too_much: BoolArray = given[:, :, None] > (taken + there)[:, None, :]
        too_much |= taken[:, None, :] > (given + here)[:, :, None]
        return too_much.reshape(len(given), -1)


def _pairs(
    loads: FloatArray, mean: FloatArray, rows: IntArray, stalled: IntArray | None
) -> tuple[IntArray, IntArray, FloatArray, BoolArray | slice]:
    """More loaded bin, less loaded bin, half their difference, and which pairs are a row's top.

    Bins are numbered through all rows. stalled: how often a row's top pair gained nothing; so far
    the less loaded are moved on against the more loaded; None: never in any row.
    """
    bins = loads.shape[1]
    half = bins // 2
    whole = len(rows) == len(loads)
    some, mean = (loads, mean[:, None]) if whole else (loads[rows], mean[rows, None])
    order = some.argsort(axis=1, kind="stable")
    if len(loads) > 1:
        order += rows[:, None] * bins
    high, low = order[:, : -half - 1 : -1], order[:, :half]
    if stalled is not None:
        low = _moved_on(low, stalled[rows])
    flat = loads.ravel()
    dear = flat.take(high)
    gap = dear - flat.take(low)
    gap /= 2
    worth = (dear > mean) & (gap > mean * (tuning.TOLERANCE / 4))
    if len(rows) == 1 and stalled is None:  # the first ones, as both fall
        count = int(np.count_nonzero(worth))
        return high[0, :count], low[0, :count], gap[0, :count], slice(1)
    at = worth.ravel().nonzero()[0]
    return high.ravel()[at], low.ravel()[at], gap.ravel()[at], at % half == 0


def _moved_on(low: IntArray, shift: IntArray) -> IntArray:
    """Each row of `low` moved on by its shift."""
    half = low.shape[1]
    if len(low) == 1:
        by = int(shift[0]) % half
        return np.concatenate((low[:, half - by :], low[:, : half - by]), axis=1)
    shifted = (np.arange(half) - shift[:, None]) % half
    moved: IntArray = low[np.arange(len(low))[:, None], shifted]
    return moved


def _at(array: NDArray[Any], bins: IntArray, slots: IntArray) -> NDArray[Any]:
    """These slots of some bins."""
    whole = len(slots) == array.shape[1]
    out: NDArray[Any] = array.take(bins, axis=0) if whole else array[bins[:, None], slots]
    return out


def _slots(slots: int, turn: int) -> IntArray:
    """Which slots of a bin take part in a round: all, or a sample that shifts with the round."""
    if slots <= tuning.SWAP_SLOTS:
        return np.arange(slots)
    return (np.arange(tuning.SWAP_SLOTS) * slots // tuning.SWAP_SLOTS + turn * 7) % slots
