"""Levels of padded micro-steps: what the dearest run of each may cost, so that they sum to the least.

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

import numpy as np

from rollout_dispatcher.balance.order import running_sums
from rollout_dispatcher.plan import FloatArray, IntArray

#: Levels that are tried first, and at least, and entries of a table of them.
_LEVELS, _LEAST_LEVELS, _TABLE = 32, 12, 1 << 17
#: They span this much below and above an even share.
_BELOW, _ABOVE = 0.75, 2.5
#: Tried around each level found, as many as the table has room for; closer ones are one.
_FINE, _ALIKE = (1.0, 0.985, 1.01, 0.97, 1.02, 0.96, 0.99), 1.003
#: Counts tried: up to so many times the fewest that fit, and these.
_TIMES_FEWEST, _MORE = 2, 2
#: More micro-steps than this, or more items, and ends are not followed run by run.
_MOST_FOLLOWED, _ITEMS_FOLLOWED = 16, 1024
#: Stages of the program then, and places where a stage may begin.
_STAGES, _PLACES = 12, 512
#: How often the factor is halved by which all levels rise.
_HALVINGS = 7


def level_runs(
    x: FloatArray, most: IntArray, R: int, fewest: int, multiple: int, begin: float
) -> IntArray:
    """Where runs begin, and the end: int64[R*M + 1], M a multiple and `fewest` or more.

    begin: what a micro-step costs besides its level.
    """
    x = x + (1e-12 * float(x[0]) or 1.0)  # costs may be 0
    if fewest > _MOST_FOLLOWED or len(x) > _ITEMS_FOLLOWED:
        return _many(x, most, R, fewest, multiple, begin)
    n, share = len(x), float(x.sum()) / R
    last = min(_TIMES_FEWEST * fewest + _MORE, n // R)
    steps = _MicroSteps(x, most, R, _grid(x, most, share / last, share / fewest))
    M = steps.count(fewest, last, multiple, begin, share)
    fine = _MicroSteps(x, most, R, _around(steps.levels_of(M)))
    for _ in range(M):
        fine.more()
    return (fine if fine.time(M) < steps.time(M) else steps).starts(M)


def _grid(x: FloatArray, most: IntArray, low: float, high: float) -> FloatArray:
    """Levels, and last one that leaves only the budget to end a run."""
    high = max(_ABOVE * high, float(x[0]))
    count = min(max(_TABLE // len(x), _LEAST_LEVELS), _LEVELS)
    return np.append(np.geomspace(_BELOW * low, high, count), float((most * x).max()))


def _around(found: FloatArray) -> FloatArray:
    per = min(max(_LEVELS // len(found), 3), len(_FINE))
    levels = np.sort(np.outer(found, _FINE[:per]).ravel())
    fine: FloatArray = levels[np.append(True, levels[1:] > levels[:-1] * _ALIKE)]
    return fine


class _MicroSteps:
    """Where a micro-step ends that begins at an item, and what it costs, for each level.

    A run may be dearer than the level if it is a single item: what it costs is counted, and the
    level only says how long runs should be.
    """

    def __init__(self, x: FloatArray, most: IntArray, R: int, levels: FloatArray) -> None:
        n, G = len(x), len(levels)
        self.x, self.most, self.R, self.levels = x, most, R, levels
        at = np.arange(n)
        length = np.clip(levels[:, None] / x * (1 + 1e-12), 1, most).astype(np.int64)
        ends, cost = np.full((G, n + 1), n), np.zeros((G, n + 1))
        np.minimum(length + at, n, out=ends[:, :n])
        np.multiply(ends[:, :n] - at, x, out=cost[:, :n])
        row = np.arange(0, G * (n + 1), n + 1)[:, None]
        flat, worst = _repeated((ends + row).ravel(), cost.ravel(), R)
        self.ends, self.cost = flat.reshape(G, n + 1) - row, worst.reshape(G, n + 1)
        nothing = np.full(n + 1, np.inf)
        nothing[n] = 0.0
        self.best = [nothing]  # time of j micro-steps from each item to the last

    def time(self, M: int) -> float:
        """Of the best M micro-steps, inf if they cannot hold all items."""
        return float(self.best[M][0])

    def more(self) -> None:
        """One more micro-step."""
        j, n = len(self.best), len(self.x)
        ends = np.minimum(self.ends, n - self.R * (j - 1))  # each later run has an item at least
        best = (self.best[-1].take(ends) + self.cost).min(axis=0)
        best[n - self.R * j + 1 :] = np.inf
        self.best.append(best)

    def count(self, fewest: int, last: int, multiple: int, begin: float, share: float) -> int:
        """How many micro-steps take the least time, with what it costs to begin each."""
        M, least = fewest, np.inf
        for count in range(1, max(last, fewest) + 1):
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

    def _walk(self, M: int) -> list[tuple[int, int, int]]:
        """First item, end and number of the level of each of M micro-steps."""
        at, found = 0, []
        for j in range(M, 0, -1):
            ends = np.minimum(self.ends[:, at], len(self.x) - self.R * (j - 1))
            level = int((self.best[j - 1][ends] + self.cost[:, at]).argmin())
            found.append((at, int(ends[level]), level))
            at = int(ends[level])
        return found

    def levels_of(self, M: int) -> FloatArray:
        """What each of M micro-steps costs."""
        return np.array([self.cost[level, at] for at, _, level in self._walk(M)])

    def starts(self, M: int) -> IntArray:
        """Where the runs of M micro-steps begin, and the end."""
        starts, most, x = [], self.most.tolist(), self.x.tolist()
        for at, end, level in self._walk(M):
            top = float(self.levels[level]) * (1 + 1e-12)
            for others in range(self.R - 1, -1, -1):
                starts.append(at)
                at = min(at + max(min(int(top / x[at]), most[at]), 1), end - others)
        return np.array([*starts, len(x)])


def _repeated(ends: IntArray, cost: FloatArray, times: int) -> tuple[IntArray, FloatArray]:
    """Follow `ends` so many times, and the largest cost on the way, by squaring."""
    done, worst = np.arange(len(ends)), np.zeros(len(ends))
    while times:
        if times & 1:
            worst = np.maximum(worst, cost.take(done))
            done = ends.take(done)
        times >>= 1
        if times:
            cost = np.maximum(cost, cost.take(ends))
            ends = ends.take(ends)
    return done, worst


def parts_of_runs(x: FloatArray, most: IntArray, levels: FloatArray) -> FloatArray:
    """How many runs there are before each item, and in all: float64[levels, n + 1], about."""
    parts = np.zeros((len(levels), len(x) + 1))
    length = (levels[:, None] / x).astype(np.int64)
    np.cumsum(1 / np.clip(length, 1, most, out=length), axis=1, out=parts[:, 1:])
    return parts


def _many(
    x: FloatArray, most: IntArray, R: int, fewest: int, multiple: int, begin: float
) -> IntArray:
    """Micro-steps of like level in stages, from parts of runs."""
    n, share = len(x), float(x.sum()) / R
    last = max(min(_TIMES_FEWEST * fewest + _MORE, n // R), fewest)
    levels = _grid(x, most, share / last, share / fewest)
    parts = parts_of_runs(x, most, levels)
    runs = parts[:, -1]
    dear = np.searchsorted(-x, -levels)  # items above each level, which are runs of their own
    over = running_sums(x)[dear] - dear * levels
    best = int(np.argmin(levels * runs + over + begin * runs))
    M = round(float(runs[best]) / R / multiple) * multiple
    M = min(max(M, fewest), max(last - last % multiple, fewest))
    stages = _stage_levels(x, levels, parts, R * M / min(M, _STAGES), min(M, _STAGES))
    return _raised(x, most, np.repeat(stages, -(-R * M // len(stages)))[: R * M])


def _stage_levels(
    x: FloatArray, levels: FloatArray, parts: FloatArray, per: float, stages: int
) -> FloatArray:
    """Levels that sum to the least of so many stages of `per` runs each."""
    n, rows = len(x), range(len(levels))
    places = np.unique(np.append(np.arange(min(n, _PLACES)), np.linspace(0, n, _PLACES + 1)))
    places = places.astype(np.int64)
    at = parts[:, places] + per
    ends = np.stack([np.searchsorted(parts[g], at[g] * (1 + 1e-12), "right") - 1 for g in rows])
    ends = np.searchsorted(places, ends, "right") - 1
    cost = np.maximum(levels[:, None], x[np.minimum(places, n - 1)])
    best = [np.where(places == n, 0.0, np.inf)]
    for _ in range(stages):
        best.append((best[-1][ends] + cost).min(axis=0))
        best[-1][-1] = 0.0
    place, found = 0, []
    for j in range(stages, 0, -1):
        level = int((best[j - 1][ends[:, place]] + cost[:, place]).argmin())
        found.append(levels[level])
        place = int(ends[level, place])
    return np.array(found)


def _raised(x: FloatArray, most: IntArray, levels: FloatArray) -> IntArray:
    """Where runs of these levels begin, and the end; all by the least factor that holds all."""
    costs, counts = x.tolist(), most.tolist()

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

    n, low, high = len(x), 0.9, 1.0
    while (found := starts(high))[-1] < n:
        low, high = high, high * (1.1 if high < 2 else 10)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = starts(middle)
        if tried[-1] < n:
            low = middle
        else:
            high, found = middle, tried
    return np.array(found)
