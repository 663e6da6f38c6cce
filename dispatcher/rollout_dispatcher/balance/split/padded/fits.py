"""Each padded run takes the level that it fills best, for many tries of levels at once.

Invariant: R runs of each level, which take neighbours from the dearest on; a run holds what its
level and `most` allow, one item at least. Items descend in cost.

A run that begins at an item of cost c fills floor(level / c) * c of its level: at each place
another level wastes least. So runs of like cost need not be neighbours. Which levels are best is
searched: tries of one level, and shaped like a falling series, with some levels single large
items; then tries around the best few. All tries are one array, so that a hundred take little
longer than one. Of many runs a few that are neighbours have one level, which saves steps.

Example, R = 2, costs 8 3 3 2 2 2 2, levels 8 and 3: 8 fills the one, 3 and 3 the other, twice, and
2 2 2 2 the one again: 8 + 3. As neighbours 8 | 3 3 and 2 2 | 2 2 take 8 + 4.
"""

import math

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.plan import FloatArray, IntArray


def fitted(x: FloatArray, most: IntArray, R: int, known: IntArray) -> IntArray:
    """The best of `known` and of all tries, by rising time: where runs begin, and the end.

    known: int64[R*M + 1]; int64[found, R*M + 1].
    """
    M = (len(known) - 1) // R
    width = max(tuning.FIT_TABLE // (R * M * M), tuning.LEAST_FITS)
    spreads = tuning.FIT_SPREADS[: 2 // neighbours(R * M)]
    found, tries = known[None], _some(_series(x, R, levels_of(known, x, R)), width)
    tries = np.concatenate((tries, _even(x, R, M)))
    for spread in (*spreads, 0.0):
        found = _best(np.concatenate((found, _filled(x, most, R, tries))), x, R)
        if spread:
            tries = _some(_around(levels_of(found, x, R), spread, x), width)
    return found


def _some(tries: FloatArray, width: int) -> FloatArray:
    """Not many more than `width` of them, of all kinds."""
    return tries[:: max(len(tries) // width, 1)]


def neighbours(runs: int) -> int:
    """How many runs of a level go together, so that many runs take no more steps than few."""
    return 1 << max(math.ceil(math.log2(runs / tuning.FIT_STEPS)), 0)


def levels_of(starts: IntArray, x: FloatArray, R: int) -> FloatArray:
    """What the dearest run of each micro-step costs, if runs of like cost share one.

    starts: int64[..., R*M + 1]; falling, float64[..., M].
    """
    cost = np.diff(starts) * x[starts[..., :-1]]
    cost.sort()
    levels: FloatArray = cost[..., ::-1][..., ::R]
    return levels


def _even(x: FloatArray, R: int, M: int) -> FloatArray:
    """Tries of one level: float64[tries, M]."""
    share = float(x.sum()) / (R * M)
    return share * np.repeat(tuning.FIT_EVEN[:, None], M, axis=1)


def _series(x: FloatArray, R: int, known: FloatArray) -> FloatArray:
    """Falling tries, about as dear together as levels that are known: float64[tries, M].

    The first ones may be large items; of the others each is so much of the one before, or all are
    so much of their first.
    """
    M, time, tries = len(known), float(known.sum()), []
    between = np.linspace(1, tuning.FIT_FACTORS[0] / tuning.FIT_FACTORS[1], len(tuning.FIT_FALL))
    for dear in sorted({0, 1, 2, M // 2, M - 1} & set(range(M))):
        large = x[: dear * R : R]
        rest = max(time - float(large.sum()), tuning.LEAST_LEVEL * time)
        steps = np.arange(M - dear)
        shapes = np.concatenate([tuning.FIT_FALL[:, None] ** by for by in (steps, steps > 0)])
        shapes *= rest * (np.tile(between, 2) / shapes.sum(axis=1))[:, None]
        scaled = (tuning.FIT_FACTORS[:, None, None] * shapes).reshape(-1, M - dear)
        tries.append(np.hstack((np.tile(large, (len(scaled), 1)), scaled)))
    return np.concatenate(tries)


def _around(levels: FloatArray, spread: float, x: FloatArray) -> FloatArray:
    """Tries that differ from the best ones' levels by so much."""
    M = levels.shape[1]
    factors = np.exp(spread * (tuning.FIT_NOISE[:, :M] - 0.5))
    tries = (levels[:, None] * factors).reshape(-1, M)
    tries[:, 0] = np.maximum(tries[:, 0], x[0])
    return tries


def _filled(x: FloatArray, most: IntArray, R: int, tries: FloatArray) -> IntArray:
    """Where the runs begin of tries that hold all items."""
    (G, M), n = tries.shape, len(x)
    levels = np.ascontiguousarray(np.maximum(tries, x[-1]).T)  # all tries of a level together
    each = 1 / levels
    per, holds = np.append((1 + 1e-12) / x, 1.0), np.append(most, 1).astype(np.float64)
    flat_levels, flat_each = levels.ravel(), each.ravel()
    together = math.gcd(R, neighbours(R * M))
    left = np.full(M * G, R // together)
    column, at = np.arange(G), np.zeros(G, dtype=np.int64)
    starts = np.zeros((R * M + 1, G), dtype=np.int64)
    length, filled = np.empty((M, G)), np.empty((M, G))
    for k in range(0, R * M, together):
        np.multiply(levels, per.take(at), out=length)
        np.floor(length, out=length)
        np.minimum(length, holds.take(at), out=length)
        chosen = np.multiply(length, each, out=filled).argmax(axis=0)
        chosen *= G
        chosen += column
        run, level = length.take(chosen), flat_levels.take(chosen)
        for end in range(k + 1, k + together + 1):
            if end > k + 1:
                run = np.minimum(np.floor(level * per.take(at)), holds.take(at))
            at += np.maximum(run, 1.0).astype(np.int64)
            np.minimum(at, n, out=at)
            starts[end] = at
        left[chosen] -= 1
        if k >= R - together:
            spent = chosen[left[chosen] == 0]
            flat_levels[spent], flat_each[spent] = -1.0, 1.0  # never the best
    last = n - np.arange(R * M, -1, -1)
    held: IntArray = np.minimum(starts[:, at == n].T, last)  # each run has an item
    return held


def _best(starts: IntArray, x: FloatArray, R: int) -> IntArray:
    """A few of different time, by rising time."""
    time = levels_of(starts, x, R).sum(axis=1)
    _, first = np.unique(np.round(time / time.min(), 6), return_index=True)
    best: IntArray = starts[first[: tuning.FITS]]
    return best
