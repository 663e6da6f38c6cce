"""Best fit decreasing: each item where it leaves the least room.

Invariant: a bin never takes more tokens than it had room for.

Example, room of 10 and 7, items of 7, 6, 4: 7 fills the second bin, 6 and 4 the first.
"""

from bisect import bisect_left, insort

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.plan import IntArray


def fit_tightly(
    s: IntArray, room: IntArray, budget: int, *, partly: bool = False
) -> IntArray | None:
    """Bin of each item of falling tokens `s`; None when one finds no room, or its -1 if `partly`.

    room: int64[bins], tokens that each bin still takes; an item above the budget needs all of it.
    """
    starts = np.flatnonzero(np.diff(s, prepend=-1))
    if tuning.ALIKE * len(starts) <= len(s):
        return _fit_runs(s, starts, room, budget, partly)
    return _fit_one_by_one(s, room, budget, partly)


def _fit_one_by_one(s: IntArray, room: IntArray, budget: int, partly: bool) -> IntArray | None:
    """An open bin is one integer, its room above its number, as comparing these is fastest."""
    bins = len(room)
    open_bins = sorted((room * bins + np.arange(bins)).tolist())
    labels = []
    whole = budget * bins
    for tokens in (s * bins).tolist():
        at = bisect_left(open_bins, min(tokens, whole))
        if at == len(open_bins):
            if not partly:
                return None
            labels.append(-1)
            continue
        room_and_bin = open_bins.pop(at)
        b = room_and_bin % bins
        labels.append(b)
        insort(open_bins, room_and_bin - tokens if tokens <= whole else b)
    return np.array(labels, dtype=np.int64)


def _fit_runs(
    s: IntArray, starts: IntArray, room: IntArray, budget: int, partly: bool
) -> IntArray | None:
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
                if not partly:
                    return None
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
