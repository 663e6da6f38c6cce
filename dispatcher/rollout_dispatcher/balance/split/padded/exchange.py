"""Padded runs of like cost share a micro-step, wherever in the sorted order they begin.

Invariant: as many runs as before, each of one item at least and of at most `most` items, counted
where it begins. Items descend in cost.

The program of levels.py makes R neighbours a micro-step. If runs are few, others may be closer in
cost: four items of 5 cost what two of 10 do. Two moves find them. *Exchange*: runs are put
together by cost, each gets the level of the micro-step that it is now in, and all levels shrink
until the runs just hold all items. *Climb*: the dearest run of a micro-step gives an item to
another run, so that all between them begin one item earlier or later, while that helps.

Example, R = 2: runs that cost 8 4 | 8 4 as neighbours take 8 + 8; put together by cost, 8 8 | 4 4,
they take 8 + 4.
"""

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.plan import BoolArray, FloatArray, IntArray


def time_of_runs(starts: IntArray, x: FloatArray, R: int) -> float:
    """Of all micro-steps, if runs of like cost share one."""
    return float(np.sort(np.diff(starts) * x[starts[:-1]])[::-1][::R].sum())


def exchanged(starts: IntArray, x: FloatArray, most: IntArray, R: int) -> IntArray:
    """The best that both moves find, from these runs and from some of one level or two."""

    def time(tried: IntArray) -> float:
        return time_of_runs(tried, x, R)

    few = len(starts) - 1 <= tuning.FEW_RUNS
    times, climbing = (
        (tuning.EXCHANGES_OF_FEW, tuning.CLIMBING_OF_FEW)
        if few
        else (tuning.EXCHANGES, tuning.CLIMBING)
    )
    found = [starts, *_starts(x, most, R, (len(starts) - 1) // R)]
    found += [_exchange(tried, x, most, R, times) for tried in found]
    found = sorted(found, key=time)[:climbing]
    return min((_climb(np.diff(tried), x, most, R) for tried in found), key=time)


def _starts(x: FloatArray, most: IntArray, R: int, M: int) -> list[IntArray]:
    """Runs of one level; or some micro-steps as dear as the largest item, the others alike."""
    share, found = float(x.sum()) / (R * M), []
    ruling = {0, 1, M // 2, M - 1} if R * M <= tuning.FEW_RUNS else {0}
    for dear in sorted(ruling):
        levels = np.full(R * M, share)
        levels[: R * dear] = x[0]
        found.append(raised(x, most, levels, np.arange(R * M) < R * dear))
    return found


def _exchange(starts: IntArray, x: FloatArray, most: IntArray, R: int, times: int) -> IntArray:
    best, least = starts, np.inf
    for turn in range(times + 1):
        count = np.diff(starts)
        cost = count * x[starts[:-1]]
        order = np.argsort(-cost, kind="stable")
        dearest = order[::R]
        time = float(cost[dearest].sum())
        if time < least:
            best, least = starts, time
        if turn == times:
            break
        levels, ruled = np.empty_like(cost), np.empty(len(cost), dtype=bool)
        levels[order] = np.repeat(cost[dearest], R)
        ruled[order] = np.repeat(count[dearest] == 1, R)
        starts = raised(x, most, levels, ruled)
    return best


def _climb(count: IntArray, x: FloatArray, most: IntArray, R: int) -> IntArray:
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


def raised(
    x: FloatArray, most: IntArray, levels: FloatArray, ruled: BoolArray | None = None
) -> IntArray:
    """Where runs of these levels begin, and the end; raised by the least factor that holds all.

    ruled: runs whose level a single item sets, which no factor below 1 lowers.
    """
    costs, counts = x.tolist(), most.tolist()
    levels = np.maximum(levels, x[-1])  # of what was to be empty as well
    kept = 0.0 if ruled is None else ruled.astype(np.float64)

    def starts(factor: float) -> list[int]:
        at, left, found = 0, len(x) - len(levels), []
        for level in (levels * np.maximum(factor, kept)).tolist():
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
