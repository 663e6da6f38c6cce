"""Greedy assignment and levelling swaps: the moves that every partition is made of.

Invariant: each item stays in exactly one slot; no step raises the largest load of a row of bins
or takes a bin beyond its count or token cap.

LPT is Graham 1969: largest item first, always into the least loaded bin. Example: [5, 4, 3, 3]
into 2 bins with caps of 2: 5 | 4, 3 joins 4, the last 3 joins 5: sums 8 and 7.
"""

from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.balance import tuning
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
    M, R = cost.shape
    orders = np.empty((M, R), dtype=np.int64)
    spread = cost.max(axis=1) - cost.min(axis=1)
    dearest_first = np.argsort(-cost, axis=1, kind="stable")
    rows = np.arange(M)[:, None]
    falling = cost[rows, dearest_first]
    by_spread = np.argsort(-spread, kind="stable")
    loads, order = np.zeros(R), np.arange(R)
    for j in by_spread[: tuning.DEALT_BY_LOAD].tolist():
        orders[j] = order = loads.argsort(kind="stable")
        loads[order] += falling[j]
    orders[by_spread[tuning.DEALT_BY_LOAD :: 2]] = order[::-1]
    orders[by_spread[tuning.DEALT_BY_LOAD + 1 :: 2]] = order
    ranks = np.empty_like(orders)
    ranks[rows, dearest_first] = orders
    return ranks


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
    flat = ids.reshape(-1)
    costs = x[flat]
    cost = costs.reshape(rows * bins, slots)
    moved: list[NDArray[Any]] = [flat, costs]
    tokens: IntArray | None = None
    stalled = np.zeros(rows, dtype=np.int64)
    patience = tuning.OTHER_PAIRINGS if s is None else tuning.OTHER_PAIRINGS_IN_BUDGET
    # Of a row: swaps do not change it.
    mean = costs.reshape(rows, -1).sum(axis=1)
    mean = (mean if base is None else mean + base.sum(axis=1)) / bins
    level, waits = mean * min(tuning.TOLERANCE, enough), enough * float(mean.sum())
    whole, sampled, any_stalled = np.arange(slots), slots > tuning.SWAP_SLOTS, False
    loads = np.zeros((rows, bins))
    all_loads = loads.ravel()
    beside = None if base is None else base.reshape(-1)
    changed: slice | IntArray = slice(None)
    for turn in range(rounds):
        held = np.add.reduce(cost[changed], axis=1)
        all_loads[changed] = held if beside is None else held + beside[changed]
        over = np.maximum.reduce(loads, axis=1) - mean
        uneven = (over > level) & (stalled <= patience)
        if float(np.add.reduce(over[uneven])) <= waits:
            break
        high, low, gap, top = _pairs(
            loads, mean, uneven.nonzero()[0], stalled if any_stalled else None
        )
        u, v = (_slots(slots, turn), _slots(slots, turn + 1)) if sampled else (whole, whole)
        error = (_at(cost, high, u) - gap[:, None])[:, :, None] - _at(cost, low, v)[:, None, :]
        np.abs(error, out=error)
        if s is not None:
            if tokens is None:
                moved.append(s[flat])
                tokens = moved[-1].reshape(rows * bins, slots)
                room, changed = np.zeros((rows * bins, parts), dtype=np.int64), slice(None)
            by_part = tokens[changed].reshape(-1, parts, slots // parts)
            room[changed] = budget - np.add.reduce(by_part, axis=2)
            np.putmask(error, _too_much(tokens, room, (high, u), (low, v)), np.inf)
        error = error.reshape(len(high), -1)
        best = error.argmin(axis=1)
        gain = error[np.arange(len(high)), best] < gap * (1 - 1e-9)
        helped = gain[top]
        if any_stalled or not np.logical_and.reduce(helped):
            row = high[top] // bins
            stalled[row] = np.where(helped, 0, stalled[row] + 1)
            any_stalled = bool(np.logical_or.reduce(stalled))
        i, j = np.divmod(best[gain], len(v))
        high, low = high[gain], low[gain]
        if len(flat) > tuning.MANY_SLOTS:
            changed = np.concatenate((high, low))
        _swap(moved, high * slots + u[i], low * slots + v[j])
    ids[...] = flat.reshape(ids.shape)


def _too_much(
    tokens: IntArray,
    room: IntArray,
    high: tuple[IntArray, IntArray],
    low: tuple[IntArray, IntArray],
) -> BoolArray:
    """Which swaps need more room than there is, [pair, slot of the high one, of the low one].

    tokens: int64[bins, slots]. room: int64[bins, parts]. high, low: bins of each pair, and slots.
    """
    part = tokens.shape[1] // room.shape[1]
    given, taken = _at(tokens, *high), _at(tokens, *low)
    here, there = room[high[0]], room[low[0]]
    if room.shape[1] > 1:
        here, there = here[:, high[1] // part], there[:, low[1] // part]
    too_much: BoolArray = given[:, :, None] > (taken + there)[:, None, :]
    too_much |= taken[:, None, :] > (given + here)[:, :, None]
    return too_much


def _swap(arrays: list[NDArray[Any]], one: IntArray, other: IntArray) -> None:
    to, source = np.concatenate((one, other)), np.concatenate((other, one))
    for array in arrays:
        array[to] = array[source]


def _pairs(
    loads: FloatArray, mean: FloatArray, rows: IntArray, stalled: IntArray | None
) -> tuple[IntArray, IntArray, FloatArray, BoolArray]:
    """More loaded bin, less loaded bin, half their difference, and which pairs are a row's top.

    Bins are numbered through all rows. stalled: how often a row's top pair gained nothing; so far
    the less loaded are moved on against the more loaded; None: never in any row.
    """
    bins = loads.shape[1]
    half = bins // 2
    order = loads[rows].argsort(axis=1, kind="stable")
    order += rows[:, None] * bins
    high, low = order[:, : -half - 1 : -1], order[:, :half]
    if stalled is not None:
        shift = stalled[rows]
        shifted = (np.arange(half) - shift[:, None]) % half
        low = low[np.arange(len(rows))[:, None], shifted]
    flat, mean = loads.ravel(), mean[rows, None]
    dear = flat.take(high)
    gap = dear - flat.take(low)
    gap /= 2
    worth = (dear > mean) & (gap > mean * (tuning.TOLERANCE / 4))
    at = worth.ravel().nonzero()[0]
    return high.ravel()[at], low.ravel()[at], gap.ravel()[at], at % half == 0


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
