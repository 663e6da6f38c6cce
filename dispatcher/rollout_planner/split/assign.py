"""One item after the other into bins: to the least loaded one, or where it leaves the least room.

Invariant: a bin holds at most its cap, in items or in tokens, or a single item that alone exceeds
it. Items descend in cost, and mostly in tokens: of whole groups the dearest need not have most.

LPT is Graham 1969. Example, budget 10, 2 bins, items of 7, 6, 4, 3 tokens: least loaded first puts
4 to the 6 and 3 to the 7; items of 6, 5, 5, 4 end as 6 4 | 5 5 by best fit.
"""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from rollout_planner.types import FloatArray, IntArray

#: The bin of each item.
Labels = IntArray


def lpt(x: FloatArray, bins: int, cap: int, start: FloatArray | None = None) -> Labels:
    """The least loaded bin that has fewer than `cap` items, for each of falling `x`.

    start: what each bin counts as loaded with before, float64[bins].
    """
    labels = lpt_budget(x, np.ones(len(x), dtype=np.int64), bins, cap, start)
    assert labels is not None, f"{len(x)} items do not fit into {bins} bins of {cap}"
    return labels


def lpt_budget(
    x: FloatArray, s: IntArray, bins: int, budget: int, start: FloatArray | None = None
) -> Labels | None:
    """The same for bins of at most `budget` tokens; None when an item finds no room.

    A bin without room for an item is parked until items are small enough for it.
    """
    loads = np.zeros(bins) if start is None else start
    heap = [(load, b) for b, load in enumerate(loads.tolist())]
    heapify(heap)
    room, parked, labels = [budget] * bins, list[tuple[int, tuple[float, int]]](), list[int]()
    for cost, tokens in zip(x.tolist(), s.tolist(), strict=True):
        while parked and -parked[0][0] >= tokens:
            heappush(heap, heappop(parked)[1])
        while heap:
            load, b = heap[0]
            left = room[b]
            if tokens <= left or (tokens > budget and left == budget):
                break  # room enough, or an item over the budget has an empty bin to itself
            heappush(parked, (-left, heappop(heap)))
        else:
            return None
        room[b] = left - tokens
        labels.append(b)
        heapreplace(heap, (load + cost, b))
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
