"""Levels of padded micro-steps, what the dearest run of each may cost, that sum to the least.

Invariant: R*M runs of neighbours, each of one item at least and of at most `most` items, counted
where it begins. Items descend in cost; there are more of them than runs.

A run that begins at an item of cost c holds floor(level / c) items, so the level says where the R
runs of a micro-step end that begin at an item. Dynamic program over these places, from the last:
the best j micro-steps from here cost the level of one of them and the best j - 1 from where it
ends. It tries a coarse grid of levels, and then a fine one around those that it found. The number
of micro-steps comes with it, as it knows the least time for each.

Of many items ends are not followed run by run: an item takes the part 1 / floor(level / c) of a
run, and the sum of these parts says how many runs there are up to it. Then micro-steps of like
level are one stage of the program, and all levels rise a little until the runs hold all items.

Example, R = 2, costs 8 7 3 3 2 2, M = 2: the level 8 ends at the first 3, 7 more would take in 3 3:
then 6 is enough for 3 3 | 2 2; 14 in all, where one micro-step needs 16: 8 7 | 3 3 2 2.
"""

from typing import NamedTuple

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.bounds import levels as even_levels
from rollout_dispatcher.balance.order import running_sums
from rollout_dispatcher.balance.split.padded.exchange import raised, time_of_runs
from rollout_dispatcher.plan import FloatArray, IntArray


class Wanted(NamedTuple):
    """How many micro-steps there may be: a multiple, and `fewest`, which is one, or more.

    R: ranks. begin: what a micro-step costs besides its level.
    """

    R: int
    fewest: int
    multiple: int
    begin: float


def level_runs(x: FloatArray, most: IntArray, wanted: Wanted) -> IntArray:
    """Where runs begin, and the end: int64[R*M + 1]. x: above 0."""
    n, R, fewest = len(x), wanted.R, wanted.fewest
    share = float(x.sum()) / R
    last = max(min(tuning.TIMES_FEWEST * fewest, n // R), fewest)
    levels = _grid(x, most, lowest(x, R, last, share), share / fewest)
    if last > tuning.STAGES or n > tuning.FOLLOWED_ONCE_UP_TO:
        return _in_stages(x, most, levels, wanted, last)
    coarse = followed if n <= tuning.FOLLOWED_UP_TO else estimated
    steps = coarse(x, most, R, levels)
    M = steps.count(wanted, last, share)
    fine = followed(x, most, R, around(steps.costs(M), levels[-1], n))
    for _ in range(M):
        fine.more()
    best = steps if n <= tuning.FOLLOWED_UP_TO and steps.time(M) < fine.time(M) else fine
    starts = _starts(x, most, R, best, best.walk(M))
    if n > tuning.FOLLOWED_UP_TO:
        by_parts = raised(x, most, np.repeat(steps.costs(M), R))
        return min(starts, by_parts, key=lambda each: time_of_runs(each, x, R))
    return starts


def lowest(x: FloatArray, R: int, M: int, share: float) -> float:
    """A level that the last of M micro-steps may have, of items of falling cost `x`."""
    return max(float(even_levels(x, R, M)[-1]), tuning.LEAST_LEVEL * share / M)


def _grid(x: FloatArray, most: IntArray, low: float, high: float) -> FloatArray:
    """Levels, and last one that leaves only the budget to end a run."""
    high = max(tuning.LEVELS_ABOVE * high, float(x[0]))
    return spaced(low, high, len(x), (float(x[0]), float((most * x).max())))


def spaced(low: float, high: float, n: int, besides: tuple[float, float]) -> FloatArray:
    """Levels to try first for n items, from below `low` up to `high`, and these."""
    count = min(max(tuning.LEVEL_TABLE // n, tuning.LEAST_LEVELS), tuning.LEVELS)
    return np.append(np.geomspace(tuning.LEVELS_BELOW * low, high, count), besides)


def around(found: FloatArray, last: float, n: int) -> FloatArray:
    """Levels close to these, and the last one."""
    room = max(tuning.LEVEL_TABLE // n, tuning.LEAST_LEVELS)
    per = min(max(room // len(found), 3), len(tuning.FINE_LEVELS))
    levels = np.sort(np.append(np.outer(found, tuning.FINE_LEVELS[:per]).ravel(), last))
    fine: FloatArray = levels[np.append(True, levels[1:] > levels[:-1] * tuning.ALIKE_LEVELS)]
    return fine


class Program:
    """The dynamic program over places where a micro-step may begin.

    ends: int64[levels, places], the number of the place where the next one begins. cost: the same
    of what it costs. leave: places that each later micro-step needs, 0 if it may be empty.
    """

    def __init__(self, levels: FloatArray, ends: IntArray, cost: FloatArray, leave: int) -> None:
        self.levels, self.ends, self.cost, self.leave = levels, ends, cost, leave
        self.end = ends.shape[1] - 1
        nothing = np.full(self.end + 1, np.inf)
        nothing[-1] = 0.0
        self.best = [nothing]  # time of j micro-steps from each place to the last

    def time(self, M: int) -> float:
        """Of the best M micro-steps, inf if they cannot hold all items."""
        return float(self.best[M][0])

    def more(self) -> None:
        """One more micro-step."""
        time = self.best[-1].take(self.ends)
        time += self.cost
        best = time.min(axis=0)
        last = max(self.end - self.leave * len(self.best), 0)
        best[last + 1 :] = best[last]  # whatever ends beyond this ends here
        self.best.append(best)

    def count(self, wanted: Wanted, last: int, share: float) -> int:
        """How many micro-steps, `last` at most, take the least time and what it costs to begin."""
        _, fewest, multiple, begin = wanted
        M, least = fewest, np.inf
        for count in range(1, last + 1):
            self.more()
            if count < fewest or count % multiple:
                continue
            if self.time(count) + begin * count < least:
                M, least = count, self.time(count) + begin * count
            elif count > M + multiple:
                break
            if self.time(count) - share < begin * multiple:
                break
        return M

    def walk(self, M: int) -> list[tuple[int, int, int]]:
        """Place, place of the end, and number of the level of each of M micro-steps."""
        at, found = 0, []
        for j in range(M, 0, -1):
            ends = np.minimum(self.ends[:, at], self.end - self.leave * (j - 1))
            level = int((self.best[j - 1][ends] + self.cost[:, at]).argmin())
            found.append((at, int(ends[level]), level))
            at = int(ends[level])
        return found

    def costs(self, M: int) -> FloatArray:
        """What each of M micro-steps costs."""
        return np.array([self.cost[level, at] for at, _, level in self.walk(M)])


def followed(x: FloatArray, most: IntArray, R: int, levels: FloatArray) -> Program:
    """Run by run from every item.

    A run may be dearer than the level if it is a single item: what it costs is counted, and the
    level only says how long runs should be.
    """
    n, G = len(x), len(levels)
    at = np.arange(n)
    longest = np.minimum(most, n - at)
    length = np.minimum(levels[:, None] * ((1 + 1e-12) / x), longest).astype(np.int64)
    np.maximum(length, 1, out=length)
    ends, cost = np.full((G, n + 1), n), np.zeros((G, n + 1))
    np.add(length, at, out=ends[:, :n])
    np.multiply(length, x, out=cost[:, :n])
    row = np.arange(0, G * (n + 1), n + 1)[:, None]
    flat, worst = repeated((ends + row).ravel(), cost.ravel(), R)
    return Program(levels, flat.reshape(G, n + 1) - row, worst.reshape(G, n + 1), R)


def repeated(ends: IntArray, cost: FloatArray, times: int) -> tuple[IntArray, FloatArray]:
    """Follow `ends` so many times, and the largest cost on the way, by squaring."""
    done: tuple[IntArray, FloatArray] | None = None
    while True:
        if times & 1 and done is None:
            done = ends, cost
        elif times & 1 and done is not None:
            done = ends.take(done[0]), np.maximum(done[1], cost.take(done[0]))
        times >>= 1
        if not times and done is not None:
            return done
        cost = np.maximum(cost, cost.take(ends))
        ends = ends.take(ends)


def _starts(
    x: FloatArray, most: IntArray, R: int, steps: Program, walk: list[tuple[int, int, int]]
) -> IntArray:
    """Where the runs of these micro-steps begin, and the end."""
    starts, counts, costs = [], most.tolist(), x.tolist()
    for first, end, level in walk:
        at, top = first, float(steps.levels[level]) * (1 + 1e-12)
        for others in range(R - 1, -1, -1):
            starts.append(at)
            at = min(at + max(min(int(top / costs[at]), counts[at]), 1), end - others)
    return np.array([*starts, len(x)])


def parts_of_runs(x: FloatArray, most: IntArray, levels: FloatArray) -> FloatArray:
    """How many runs there are before each item, and in all: float64[levels, n + 1], about."""
    parts = np.zeros((len(levels), len(x) + 1))
    length = (levels[:, None] / x).astype(np.int64)
    np.cumsum(1 / np.clip(length, 1, most, out=length), axis=1, out=parts[:, 1:])
    return parts


def estimated(
    x: FloatArray, most: IntArray, per: float, levels: FloatArray, parts: FloatArray | None = None
) -> Program:
    """From parts of runs, `per` of them a micro-step, and from some of the items only."""
    n = len(x)
    parts = parts_of_runs(x, most, levels) if parts is None else parts
    places = np.unique(
        np.append(
            np.arange(min(n, tuning.STAGE_PLACES)), np.linspace(0, n, tuning.STAGE_PLACES + 1)
        )
    )
    places = places.astype(np.int64)
    at = (parts[:, places] + per) * (1 + 1e-12)
    ends = np.stack([row.searchsorted(to, "right") - 1 for row, to in zip(parts, at, strict=True)])
    ends = places.searchsorted(ends, "right") - 1
    cost = np.maximum(levels[:, None], x[np.minimum(places, n - 1)])
    cost[:, -1] = 0.0
    return Program(levels, ends, cost, 0)


def _in_stages(
    x: FloatArray, most: IntArray, levels: FloatArray, wanted: Wanted, last: int
) -> IntArray:
    """Micro-steps of like level together, from parts of runs."""
    R, fewest, multiple, begin = wanted
    parts = parts_of_runs(x, most, levels)
    if last <= tuning.STAGES:
        steps = estimated(x, most, R, levels, parts)
        M = stages = steps.count(wanted, last, float(x.sum()) / R)
    else:
        runs, dear = parts[:, -1], np.searchsorted(-x, -levels)
        over = running_sums(x)[dear] - dear * levels  # of items that are dearer than the level
        best = float(runs[int(np.argmin(levels * runs + over + begin * runs))])
        M = min(max(round(best / R / multiple) * multiple, fewest), last - last % multiple)
        stages = min(M, tuning.STAGES)
        steps = estimated(x, most, R * M / stages, levels, parts)
        for _ in range(stages):
            steps.more()
    return raised(x, most, np.repeat(steps.costs(stages), -(-R * M // stages))[: R * M])
