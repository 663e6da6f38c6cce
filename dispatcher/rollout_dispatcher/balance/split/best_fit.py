"""Best fit decreasing: each item where it leaves the least room.

Invariant: a bin never takes more tokens than it had room for.

Example, room of 10 and 7, items of 7, 6, 4: 7 fills the second bin, 6 and 4 the first.
"""

from bisect import bisect_left, insort

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.plan import IntArray


def best_fit(s: IntArray, room: IntArray, budget: int) -> IntArray:
    """Each item of falling `s` into the bin where it leaves the least room; -1 if it fits nowhere.

    room: int64[bins], tokens that each bin still takes; an item above the budget needs all of it.
    """
    if not (len(s) and len(room)):
        return np.full(len(s), -1)
    changes = s[1:] != s[:-1]
    if tuning.ALIKE * (1 + int(np.count_nonzero(changes))) <= len(s):
        return _fit_runs(s, np.append(0, changes.nonzero()[0] + 1), room, budget)
    return _fit_one_by_one(s, room, budget)


def _fit_one_by_one(s: IntArray, room: IntArray, budget: int) -> IntArray:
    """A bin is one integer, its room above its number, as comparing these is fastest.

    Only bins that are in use and have room for the smallest item are searched.
    """
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


def _fit_runs(s: IntArray, starts: IntArray, room: IntArray, budget: int) -> IntArray:
    """All items of one length at once, into all bins of one room: what is left is the same.

    Once the tightest bin has taken one, it is the tightest for the next, as long as that fits.
    """
    order = np.argsort(room, kind="stable")
    distinct, firsts = np.unique(room[order], return_index=True)
    rooms: list[int] = distinct.tolist()
    bins_of = dict(zip(rooms, _cut(order.tolist(), firsts.tolist()), strict=True))

    def put_back(left: int, bins: list[int]) -> None:
        if left in bins_of:
            bins_of[left] += bins
        else:
            bins_of[left] = bins
            insort(rooms, left)

    labels: list[int] = []
    ends = np.append(starts[1:], len(s)).tolist()
    for tokens, end in zip(np.minimum(s[starts], budget).tolist(), ends, strict=True):
        while (missing := end - len(labels)) > 0:
            at = bisect_left(rooms, tokens)
            if at == len(rooms):
                labels += [-1] * missing
                break
            left = rooms[at]
            each, tightest = left // tokens if tokens else missing, bins_of[left]
            taken = tightest[: -(-missing // each)]
            if len(taken) < len(tightest):
                del tightest[: len(taken)]
            else:
                del bins_of[left], rooms[at]
            labels += taken if each == 1 else [b for b in taken for _ in range(each)][:missing]
            left -= each * tokens
            if spare := max(len(taken) * each - missing, 0):  # the last of them takes fewer
                put_back(left + spare * tokens, [taken.pop()])
            if taken:
                put_back(left, taken)
    return np.array(labels, dtype=np.int64)


def _cut(items: list[int], firsts: list[int]) -> list[list[int]]:
    """Runs of items that begin at `firsts`."""
    return [items[a:b] for a, b in zip(firsts, [*firsts[1:], None], strict=True)]
