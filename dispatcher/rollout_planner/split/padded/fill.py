"""Padded runs of like cost share a micro-step, wherever in the falling order they begin.

Invariant: runs of neighbours, each of one item at least and of no more samples than it may hold;
the result never takes longer than what the search began with.

A run that begins at an item of cost c fills floor(level / c) * c of its level: at each place
another level wastes least. So runs of like cost need not be neighbours: each run takes the level
that it fills best. Which levels are best is searched: those of the best runs so far, each somewhat
higher or lower, many tries at once, in rounds that stay closer and closer.

Where ranks meet once a step, what counts is what the most loaded one has: ends then move to where
both runs beside them waste least.

Example, R = 2, costs 8 3 3 2 2 2 2, levels 8 and 3: 8 fills the one, 3 and 3 the other, twice, and
2 2 2 2 the one again: 8 + 3. As neighbours 8 | 3 3 and 2 2 | 2 2 take 8 + 4.
"""

from typing import NamedTuple

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import running_sums
from rollout_planner.split.padded.levels import Counts, Items, level_runs, with_all
from rollout_planner.types import FloatArray, IntArray


def padded_runs(items: Items, counts: Counts, *, per_step: bool) -> IntArray | None:
    """Where the best runs begin, and the end; None if no way has room for all items.

    per_step: whether ranks meet once a step, so that what counts is the most loaded one.
    """
    n, runs = len(items), counts.R * counts.fewest
    if n <= runs:
        return np.arange(n + 1)
    known, most = list[IntArray](), int(items.most[0])
    if items.are_samples:
        known.append(np.arange(runs + 1) * n // runs)
        if runs * most >= n:  # as full as can be, and what lacks is lacking beside the longest
            lacks = np.clip(runs * most - n - np.arange(runs) * (most - 1), 0, most - 1)
            known.append(running_sums(most - lacks))
        if runs * most == n and counts.fewest == counts.last:
            return known[-1]
    known = [each for each in known if items.are_legal(each)]
    known += level_runs(items, counts)
    if not known:
        return None
    pool = _Pool(items, counts, per_step)
    for starts in known:
        pool.add(starts)
    for noise in tuning.NOISE[: 1 if per_step or not items.are_samples else None]:
        pool.search(noise)  # where ranks meet once a step, and of groups, more hardly helps
    if per_step:
        for starts in {len(each.starts): each.starts for each in reversed(pool.found)}.values():
            for part in tuning.LARGEST_RUN:
                pool.add(moved(items, starts, part * items.work / counts.R))
    return pool.found[0].starts


class _Found(NamedTuple):
    """Runs, what they take, and the level of each stage of M micro-steps."""

    price: float
    M: int
    levels: FloatArray
    starts: IntArray


class _Pool:
    """The best runs so far, by rising price, and tries around them."""

    def __init__(self, items: Items, counts: Counts, per_step: bool) -> None:
        self.items, self.counts, self.per_step = items, counts, per_step
        self.found: list[_Found] = []

    def add(self, starts: IntArray) -> None:
        """Runs that begin there."""
        cost, M = self.items.costs(starts), (len(starts) - 1) // self.counts.R
        price = float(self.prices(cost[:, None], np.array([M]))[0])
        levels = level_of(cost, self.counts.R)[:: self.counts.together]
        self.found.append(_Found(price, M, levels, starts))
        self.found.sort(key=lambda each: each.price)

    def prices(self, cost: FloatArray, M: IntArray) -> FloatArray:
        """What tries take, and what it costs to begin M micro-steps; cost: float64[runs, tries]."""
        R, time = self.counts.R, np.zeros(cost.shape[1])
        if self.per_step:  # LPT, a round of ranks at a time
            falling, load = -np.sort(-cost, axis=0), np.zeros((R, cost.shape[1]))
            for first in range(0, len(cost), R):
                load.sort(axis=0)
                load[: len(cost) - first] += falling[first : first + R]
            time = load.max(axis=0)
        else:
            time = level_of(cost, R).sum(axis=0)
        prices: FloatArray = time + self.counts.begin * M
        return prices

    def search(self, noise: FloatArray) -> None:
        """Levels somewhat above or below those of the best, and at first of all alike."""
        items, R, n, together = self.items, self.counts.R, len(self.items), self.counts.together
        best, depth = self.found[0], -(-self.counts.last // together)
        even = np.full(len(best.levels), items.work / (R * best.M))
        parents = (*self.found[: tuning.KEPT], best._replace(levels=even))
        noise = np.exp(noise[:: max(R * best.M // tuning.ALL_TRIED, 1)])
        tries, copies = np.ones((depth, len(noise))), np.zeros((depth, len(noise)), dtype=np.int64)
        for i, (_, M, levels, _) in enumerate(parents):
            own, last = slice(i, None, len(parents)), len(levels) - 1
            tries[: last + 1, own] = (levels * noise[own, : last + 1]).T
            copies[:last, own], copies[last, own] = R * together, R * (M - together * last)
        np.maximum(tries[0], items.x[0], out=tries[0])
        begins = fill(items, tries, copies, n)
        ended = np.flatnonzero(begins[-1] == n)
        runs = copies[:, ended].sum(axis=0)
        prices = self.prices(items.costs(begins[:, ended]), runs // R)
        _, first = np.unique(np.round(prices / self.found[0].price, 6), return_index=True)
        for i in first[: tuning.KEPT].tolist():
            self.add(with_all(begins[:, ended[i]], int(runs[i]), n))


def level_of(cost: FloatArray, R: int) -> FloatArray:
    """Falling costs of the dearest run of each micro-step, float64[M, ...]; cost: [runs, ...]."""
    levels: FloatArray = -np.sort(-cost, axis=0)[::R]
    return levels


def fill(items: Items, levels: FloatArray, copies: IntArray, n: int) -> IntArray:
    """Where runs begin, and the end, int64[runs + 1, tries]; some are empty.

    levels: float64[M, tries]; copies: int64[M, tries], runs of each level. A try whose runs do not
    hold all items ends before them.
    """
    G, held, most, per = levels.shape[1], items.held, items.most, (1 + 1e-12) / items.x
    together = max(int(copies.sum(axis=0).max()) // tuning.FILL_STEPS, 1)
    levels, left = np.where(copies > 0, levels, -1.0), copies.copy()
    each = 1 / np.abs(levels)
    flat_levels, flat_left, column = levels.ravel(), left.ravel(), np.arange(G)
    at, starts = np.zeros(G, dtype=np.int64), [np.zeros(G, dtype=np.int64)]
    for step in range(steps := int((-(-copies // together)).sum(axis=0).max())):
        if step == steps - 1 and together == 1:
            np.copyto(levels, np.inf, where=levels > 0)  # the last run takes what is left
        length = np.minimum(np.floor(levels * per.take(at)), most.take(at))
        if not items.are_samples:
            ends = held.searchsorted(held.take(at) + np.maximum(length, 0.0), "right") - 1
            length = np.where(levels > 0, held.take(ends) - held.take(at), -1.0)
        chosen = (length * each).argmax(axis=0) * G + column
        level, runs = flat_levels.take(chosen), flat_left.take(chosen)
        for run in range(together):
            if run or not items.are_samples:
                to = items.after(at, level)
            else:
                to = at + np.maximum(length.take(chosen), 1.0).astype(np.int64)
            at = np.minimum(np.where(runs > run, to, at), n)
            starts.append(at)
        flat_left[chosen] = runs - together
        flat_levels[chosen[runs <= together]] = -1.0  # never the best
        if (at == n).all():
            break
    return np.array(starts)


def moved(items: Items, starts: IntArray, largest: float) -> IntArray:
    """Each run's end moved between its neighbours' to where both waste least, in turns.

    largest: what a run may cost, unless it costs more already.
    """
    starts, x, held = starts.copy(), items.x, items.held
    for sweep in range(tuning.END_SWEEPS):
        turn = np.arange(1 + sweep % 2, len(starts) - 1, 2)
        first, at, last = starts[turn - 1, None], starts[turn, None], starts[turn + 1, None]
        spread = first + ((last - first) * tuning.END_SPREAD).astype(np.int64)
        to = np.concatenate((at, spread, at + tuning.END_CLOSE), axis=1)
        to = np.clip(to, first + 1, last - 1)
        one, other = held[to] - held[first], held[last] - held[to]
        fits = (one <= items.most[first]) | (to - first == 1)
        fits &= (other <= items.most[to]) | (last - to == 1)
        dear = np.maximum(one * x[first], other * x[to])
        fits &= dear <= np.maximum(largest, dear[:, :1])
        best = np.where(fits, one * x[first] + other * x[to], np.inf).argmin(axis=1)
        starts[turn] = to[np.arange(len(turn)), best]
    return starts
