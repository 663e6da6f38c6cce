"""Bins under a token budget: greedily by cost, or as tightly as can be.

Invariant: a bin holds at most `budget` tokens, or a single item that alone exceeds it. Items
descend in cost, and mostly in tokens: of whole groups the dearest need not have most.

Example, budget 10, 2 bins, items of 7, 6, 4, 3 tokens: least loaded first puts 4 to the 6 and 3
to the 7; items of 6, 5, 5, 4 end as 6 4 | 5 5 by best fit.
"""

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.order import as_whole
from rollout_dispatcher.balance.split.best_fit import best_fit
from rollout_dispatcher.plan import FloatArray, IntArray

Labels = IntArray


def goes_by_chunks(n: int, bins: int) -> bool:
    """Whether so many items are better placed a round at a time than one by one."""
    return n > tuning.CHUNKED_FROM and bins >= tuning.CHUNKED_BINS


def lpt_budget(
    x: FloatArray, s: IntArray, bins: int, budget: int, start: FloatArray | None = None
) -> Labels | None:
    """LPT on `x` into bins of at most `budget` tokens; None when an item finds no room.

    start: what each bin counts as loaded with before, float64[bins].
    """
    loads = np.zeros(bins) if start is None else start
    if not goes_by_chunks(len(x), bins):
        return _lpt_one_by_one(x, s, loads, budget)
    return _lpt_budget_chunked(x, s, loads.copy(), budget)


def _lpt_budget_chunked(
    x: FloatArray, s: IntArray, loads: FloatArray, budget: int
) -> Labels | None:
    """LPT where each round gives the least loaded half of the bins that have room one item.

    If the last and smallest items find no room that way, they go by best fit instead.
    """
    bins = len(loads)
    room = np.full(bins, budget)
    labels = np.empty(len(x), dtype=np.int64)
    done, tail = 0, len(x)
    before = room
    while done < len(x):
        if tail == len(x) and done >= len(x) - tuning.TAIL * bins:
            tail, before = done, room.copy()
        largest = s[done : done + bins // 2].max()  # the first, where tokens fall
        fits = np.flatnonzero((room >= largest) | (room == budget))
        take = min(bins // 2, len(x) - done, len(fits))
        if not take:
            return _end_by_fit(labels, s, tail, before, budget)
        target = fits[np.argsort(loads[fits], kind="stable")[:take]]
        labels[done : done + take] = target
        loads[target] += x[done : done + take]
        room[target] = np.maximum(room[target] - s[done : done + take], 0)
        done += take
    return labels


def _end_by_fit(
    labels: Labels, s: IntArray, done: int, room: IntArray, budget: int
) -> Labels | None:
    rest = best_fit(s[done:], room, budget)
    if rest.min(initial=0 if len(rest) else -1) < 0:
        return None
    labels[done:] = rest
    return labels


def _lpt_one_by_one(x: FloatArray, s: IntArray, loads: FloatArray, budget: int) -> Labels | None:
    """LPT that knows no budget, and if a bin then exceeds it, once more with an eye to it.

    If none does, no item would have found its bin without room, so that it is the same. A bin is
    one number, its load above its own, as comparing these is fastest: exact up to 2^52, and costs
    that are not whole, or larger in all, are rounded to so many bits.
    """
    unit = 1 << len(loads).bit_length()
    whole = as_whole(np.concatenate((loads, x)), 2.0**52 / unit) * unit
    bins, costs = whole[: len(loads)] + np.arange(len(loads)), whole[len(loads) :]
    first = _one_each(costs, whole[: len(loads)])
    filled = bins.copy()
    filled[:first] += costs[:first]
    heap: list[float] = filled.tolist()
    heapify(heap)
    least = [heapreplace(heap, heap[0] + cost) for cost in costs[first:].tolist()]
    found = np.fromiter([*range(first), *least], np.float64, len(x))
    labels = found.astype(np.int64) & (unit - 1)
    held = np.bincount(labels, weights=s)
    if float(np.maximum.reduce(held, initial=0)) <= budget:
        return labels
    keys: list[list[int]] = [each.astype(np.int64).tolist() for each in (costs, bins)]
    return _lpt_in_budget(keys[0], keys[1], s.tolist(), budget)


def _one_each(x: FloatArray, loads: FloatArray) -> int:
    """How many items, the first ones, find an empty bin each, in turn: LPT need not look for it."""
    bins = len(loads)
    return bins if len(x) >= bins and x[bins - 1] > 0 and not loads.any() else 0


def _lpt_in_budget(costs: list[int], heap: list[int], s: list[int], budget: int) -> Labels | None:
    """A bin without room for an item is parked until items are small enough for it."""
    heapify(heap)
    parked: list[tuple[int, int]] = []
    room, low = [budget] * len(heap), (1 << len(heap).bit_length()) - 1
    placed: list[int] = []
    for cost, tokens in zip(costs, s, strict=True):
        while parked and -parked[0][0] >= tokens:
            heappush(heap, heappop(parked)[1])
        while heap:
            least = heap[0]
            left = room[least & low]
            if tokens <= left or (tokens > budget and left == budget):
                break  # room enough, or an item over the budget has an empty bin to itself
            heappop(heap)
            heappush(parked, (-left, least))
        else:
            return None
        b = least & low
        room[b] = left - tokens
        placed.append(b)
        heapreplace(heap, least + cost)
    return np.array(placed, dtype=np.int64)
