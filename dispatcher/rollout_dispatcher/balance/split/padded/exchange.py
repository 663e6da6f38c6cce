"""Padded runs of like cost share a micro-step, wherever in the sorted order they begin.

Invariant: as many runs as before, each of one item at least and of at most `most` items, counted
where it begins. Items descend in cost.

The program of levels.py makes R neighbours a micro-step. Others may be closer in cost: four items
of 5 cost what two of 10 do. fits.py finds them: at each place the level that is filled best. Of
few runs the best then *climb*: the dearest run of a micro-step gives an item to another run, so
that all between them begin one item earlier or later, while that helps.

Example, R = 2: runs that cost 8 4 | 8 4 as neighbours take 8 + 8; put together by cost, 8 8 | 4 4,
they take 8 + 4.
"""

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.split.padded.fits import fitted, levels_of, neighbours
from rollout_dispatcher.plan import FloatArray, IntArray


def time_of_runs(starts: IntArray, x: FloatArray, R: int) -> float:
    """Of all micro-steps, if runs of like cost share one."""
    return float(levels_of(starts, x, R).sum())


def exchanged(starts: IntArray, x: FloatArray, most: IntArray, R: int) -> IntArray:
    """The best that both find, from these runs on."""
    found = fitted(x, most, R, starts)
    first = found[: tuning.CLIMBING // neighbours(len(starts) - 1)]
    better = [climbed(np.diff(each), x, most, R) for each in first]
    return min((*better, found[0]), key=lambda each: time_of_runs(each, x, R))


def lacking_first(n: int, runs: int, most: int) -> IntArray:
    """Items of each run if the first lack all that there is to lack.

    Of n items up to `most` in a run: single long ones are what padding costs most.
    """
    lacks = runs * most - n - np.arange(runs) * (most - 1)
    count: IntArray = most - np.clip(lacks, 0, most - 1)
    return count


def climbing(R: int, M: int) -> float:
    """Operations of that: each climb compares givers times takers times runs."""
    looked_at = min(M * (2 * M + 4) * R * M, tuning.CLIMB_LOOKED_AT)
    return tuning.CLIMB.of(tuning.CLIMBS * looked_at, 0, 0)


def climbed(count: IntArray, x: FloatArray, most: IntArray, R: int) -> IntArray:
    """count: items of each run."""
    runs = len(count)
    order = np.argsort(-count * x[np.cumsum(count) - count], kind="stable")
    least = np.inf
    for _ in range(tuning.CLIMBS):
        givers = order[::R][count[order[::R]] > 1]
        cheapest = np.concatenate((order[R - 1 :: R], order[max(R - 2, 0) :: R]))
        cheapest = cheapest[:: 1 + len(givers) * len(cheapest) * runs // tuning.CLIMB_LOOKED_AT]
        near = (givers[:, None] + (-2, -1, 1, 2)) % runs
        takers = np.concatenate((np.tile(cheapest, (len(givers), 1)), near), axis=1).ravel()
        tried = np.tile(count, (len(takers) + 1, 1))  # the last one as it is
        rows = np.arange(len(takers))
        tried[rows, np.repeat(givers, len(cheapest) + 4)] -= 1
        tried[rows, takers] += 1
        begin = np.cumsum(tried, axis=1) - tried
        cost = tried * x[begin]
        time = np.sort(cost, axis=1)[:, ::-1][:, ::R].sum(axis=1)
        time[((tried > most[begin]) & (tried > 1)).any(axis=1)] = np.inf
        best = int(time.argmin())
        if not time[best] < least * (1 - 1e-9):
            break
        least, count, order = float(time[best]), tried[best], np.argsort(-cost[best], kind="stable")
    return np.append(0, np.cumsum(count))


def raised(x: FloatArray, most: IntArray, levels: FloatArray) -> IntArray:
    """Where runs of these levels begin, and the end; raised by the least factor that holds all."""
    costs, counts = x.tolist(), most.tolist()
    levels = np.maximum(levels, x[-1])  # of what was to be empty as well

    def starts(factor: float) -> list[int]:
        at, left, found = 0, len(x) - len(levels), []
        for level in (levels * factor).tolist():
            found.append(at)
            more = min(int(level / costs[at]), counts[at]) - 1
            if more > 0:
                more = min(more, left)
                left -= more
                at += more
            at += 1
        return [*found, at]

    n, low, high = len(x), 0.7, 1.0
    while (found := starts(high))[-1] < n:
        low, high = high, high * (1.1 if high < 2 else 10)
    for _ in range(tuning.HALVINGS):
        middle = (low + high) / 2
        tried = starts(middle)
        if tried[-1] < n:
            low = middle
        else:
            high, found = middle, tried
    return np.array(found)
