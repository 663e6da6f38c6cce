"""Padded micro-batches of a number of samples at most, where there is room to spare.

Invariant: each item is in exactly one run of neighbours, with all of its samples; a run has at most
`most` samples and is padded to the longest of them. There are R*M runs, none empty unless there are
fewer items. Items descend in the cost of their longest sample.

Where all micro-batches are full, sorted runs of so many samples waste least. With fewer samples, or
with items of several (groups that stay in one micro-batch), where runs end is free: long samples
should go in small numbers and short ones in large, so that the runs of a micro-step cost alike.
That is the program of levels.py, with items that count as the samples they have. Where ranks meet
once a step runs need not be alike: a program over their ends finds the least total, and another one
if a run may cost no more than a part of a rank's share.

Example, R = 2, M = 1, up to 4 samples, costs 9 3 3 2: a run of 4 takes 36, and 9 | 3 3 2 takes 9.
"""

from typing import NamedTuple

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.order import running_sums
from rollout_dispatcher.balance.split.padded.ends import least_runs
from rollout_dispatcher.balance.split.padded.levels import (
    Program,
    around,
    lowest,
    repeated,
    spaced,
)
from rollout_dispatcher.balance.split.padded.runs import places_of
from rollout_dispatcher.plan import FloatArray, IntArray


class Items(NamedTuple):
    """longest: float64[n], falling, what the longest sample of each costs. size: int64[n], samples
    of each, `most` of a micro-batch at most.
    """

    longest: FloatArray
    size: IntArray
    most: int


def shared_runs(items: Items, R: int, M: int, *, per_step: bool) -> list[IntArray]:
    """Places, rank * M + micro-step, of each item, once for each way; none if items do not fit."""
    n, spare = len(items.size), R * M * items.most - len(items.size)
    if n <= R * M:
        found = [np.arange(n + 1)]
    elif per_step:
        found = _least_totals(items, R, M)
    else:
        found = _levelled(items, R, M)
    if items.size.max() == 1 and spare < min(items.most, n):
        # Sorted runs whose first lacks all that there is to lack: it is beside the longest.
        found.append(np.append(0, np.arange(items.most - spare, n + 1, items.most)))
    return [_places(starts, items, R, M, per_step) for starts in found]


def _places(starts: IntArray, items: Items, R: int, M: int, per_step: bool) -> IntArray:
    held = running_sums(items.size)
    load = np.diff(held[starts]) * items.longest[starts[:-1]]
    return np.repeat(places_of(load, R, M, per_step), np.diff(starts))


def _levelled(items: Items, R: int, M: int) -> list[IntArray]:
    """Where runs begin, and the end, so that micro-steps sum to little."""
    x = items.longest + (1e-12 * float(items.longest[0]) or 1.0)
    items, n = items._replace(longest=x), len(x)
    own, share = -np.sort(-x * items.size), float((x * items.size).sum()) / R
    high = max(tuning.LEVELS_ABOVE * share / M, float(own[0]))
    low, last = lowest(own, R, M, share), float(x[0]) * items.most
    coarse = _followed(items, R, M, spaced(low, high, n, (float(own[0]), last)))
    if coarse.time(M) == np.inf:
        return []
    fine = _followed(items, R, M, around(coarse.costs(M), last, n))
    return [_starts(items, R, min(coarse, fine, key=lambda steps: steps.time(M)), M)]


def _followed(items: Items, R: int, M: int, levels: FloatArray) -> Program:
    """As that of levels.py, with items that count as the samples they have; M micro-steps of it."""
    x, size, most = items
    n, G, held = len(x), len(levels), running_sums(size)
    room = np.minimum(levels[:, None] * ((1 + 1e-12) / x), most)
    ends, cost = np.full((G, n + 1), n), np.zeros((G, n + 1))
    stops = held.searchsorted((held[:-1] + room).ravel(), "right").reshape(G, n) - 1
    np.maximum(stops, np.arange(1, n + 1), out=ends[:, :n])
    np.multiply(held[ends[:, :n]] - held[:-1], x, out=cost[:, :n])
    row = np.arange(0, G * (n + 1), n + 1)[:, None]
    flat, worst = repeated((ends + row).ravel(), cost.ravel(), R)
    steps = Program(levels, flat.reshape(G, n + 1) - row, worst.reshape(G, n + 1), R)
    for _ in range(M):
        steps.more()
    return steps


def _starts(items: Items, R: int, steps: Program, M: int) -> IntArray:
    """Where the runs of these micro-steps begin, and the end."""
    starts, held, x = [], running_sums(items.size), items.longest
    for first, end, level in steps.walk(M):
        at, top = first, float(steps.levels[level]) * (1 + 1e-12)
        for others in range(R - 1, -1, -1):
            starts.append(at)
            room = min(top / float(x[at]), items.most)
            stop = int(held.searchsorted(float(held[at]) + room, "right")) - 1
            at = min(max(stop, at + 1), end - others)
    return np.array([*starts, len(x)])


def _least_totals(items: Items, R: int, M: int) -> list[IntArray]:
    """Ends of runs that pad least, whatever they cost; and if none may rule a rank."""
    width, longest = _width(items), items.longest
    if width * len(longest) * R * M > tuning.SHARED_TABLE:
        return _levelled(items, R, M)
    cost, share = _costs(items, width), float((longest * items.size).sum()) / R
    found = _capped(cost, R * M, [np.inf])
    if not found:
        return []
    held, floor = running_sums(items.size), float(cost[0].max())
    largest = float((np.diff(held[found[0]]) * longest[found[0][:-1]]).max())
    caps = [max(part * share, floor) for part in (*tuning.LARGEST_RUN, *tuning.LARGER_RUN)]
    for starts in _capped(cost, R * M, [cap for cap in caps if cap < largest]):
        if not any(np.array_equal(starts, each) for each in found):
            found.append(starts)
    return found[: 1 + len(tuning.LARGEST_RUN)]


def _width(items: Items) -> int:
    """Items that a run may have."""
    held = running_sums(items.size)
    fits = held.searchsorted(held[:-1] + items.most, "right") - 1
    return int((fits - np.arange(len(fits))).max())


def _costs(items: Items, width: int) -> FloatArray:
    """What a run of j + 1 items costs that begins at i, float64[width, n]; inf where none may."""
    n, held = len(items.size), running_sums(items.size)
    ends = np.arange(1, width + 1)[:, None] + np.arange(n)
    samples = held[np.minimum(ends, n)] - held[:-1]
    legal = (ends <= n) & (samples <= items.most)
    cost: FloatArray = np.where(legal, samples * items.longest, np.inf)
    return cost


def _capped(cost: FloatArray, runs: int, caps: list[float]) -> list[IntArray]:
    """Where so many runs begin that cost the least in all, and the end, for each of these caps.

    A cap within which runs do not hold all items is left out.
    """
    if not caps:
        return []
    tables = np.where(cost[:, None] <= np.array(caps)[:, None], cost[:, None], np.inf)
    n = cost.shape[1]
    counts, _ = least_runs(tables, np.full(len(caps), n), runs)
    return [np.append(0, np.cumsum(each)) for each in counts if each.sum() == n]


def first_fit_items(size: IntArray, bins: int, most: int) -> IntArray | None:
    """Micro-batch of each item, in this order, the first that has room; None if one finds none.

    Rooms only shrink, so that for items of a size no place is looked at twice.
    """
    room, first = [most] * bins, [0] * (int(size.max()) + 1)
    place = np.empty(len(size), dtype=np.int64)
    for i, each in enumerate(size.tolist()):
        at = first[each]
        while at < bins and room[at] < each:
            at += 1
        if at == bins:
            return None
        first[each] = place[i] = at
        room[at] -= each
    return place
