"""Selection: which samples of the window this step takes.

Invariant: exactly `take` items, with every item that is due among them (as far as they fit):
nobody is skipped beyond its bound, now or in any later step that takes as many.

Candidates are tried from the least to the most selective, and the first that waits no more than
`GOOD_ENOUGH` ends the search, so that ages and lengths are disturbed only as far as it pays:
the oldest; the outlier lane (lane.py), which holds the heaviest back or lets them leave together;
the column DP (column_dp.py), which looks for micro-steps of alike samples. Where micro-steps have
a fixed size there is the DP alone, and once more if something is due, with the heaviest leaving
together: nothing else beats it there.

Example: 3 of 5 to take, two ranks, costs in arrival order 9 1 1 1 1: the oldest three, 9 1 1,
make one rank wait (9 | 2); holding the 9 back gives 1 1 1 with less waiting. Once the 9 is due,
it leaves with the heaviest company there is.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np

from rollout_planner import tuning
from rollout_planner.select.column_dp import column_dp
from rollout_planner.select.lane import Lane, Pool, keep_oldest
from rollout_planner.select.loss_bound import LossBound
from rollout_planner.types import BoolArray, FloatArray, IntArray

#: Mask of the items to keep -> waiting of a good split of them, over the work of a mean batch. If
#: it surely is so much, the second argument, this is answered: it does not matter how much more.
Judge = Callable[[BoolArray, float], float]


@dataclass(frozen=True, slots=True)
class Selection:
    """Mask of the items to keep, what they are thought to wait, and what that costs later on."""

    keep: BoolArray
    waits: float = 0.0
    later: float = 0.0

    @property
    def total(self) -> float:
        """What decides."""
        return self.waits + self.later


def due(left: IntArray, must_go: BoolArray, take: int, size: IntArray | None = None) -> BoolArray:
    """Items that have to go now, most urgent first where they are more than `take` samples.

    For every j, of the samples with at most j skips left all but j * take go now: the j steps
    that remain before the last of them is due can take no more.
    Example: take 2, skips left 0 1 1 1: the first is due, and of the four with at most one skip
    left 4 - 1 * 2 = 2 must go: the first and one more.
    """
    n = len(left)
    samples = n if size is None else int(size.sum())
    forced = np.zeros(n, dtype=bool)
    if not n or (not must_go.any() and samples <= int(left.min()) * take):
        return forced  # even the first deadline leaves room for all
    rest = -(-samples // take)  # with so many skips left nothing has to go
    urgency = np.minimum(np.maximum(left, 0), min(rest, 32766)) + 1
    urgency[must_go] = 0
    held = np.bincount(urgency, weights=size).cumsum()
    over = held - np.maximum(np.arange(len(held)) - 1, 0) * take
    need = int(np.maximum.reduce(over, initial=0))
    if not need:
        return forced
    order = urgency.astype(np.int16).argsort(kind="stable")  # sorts by radix
    if size is None:
        forced[order[: min(need, take)]] = True
        return forced
    before = size[order].cumsum() - size[order]
    forced[order[(before < need) & (before < take)]] = True
    return forced


def select(pool: Pool, take: int, judge: Judge, bound: LossBound | None = None) -> list[Selection]:
    """The `take` items that leave together with the least waiting; then the oldest.

    bound: all of them keep it as far as what is forced lets them.
    """
    keep = keep_oldest(pool.forced, take)
    if take >= len(keep):
        return [Selection(keep)]
    if bound is not None:
        keep = bound.within(keep, pool.forced)
    waits = judge(keep, math.inf)
    if waits <= tuning.GOOD_ENOUGH:
        return [Selection(keep, waits)]
    lane = Lane.of(pool)
    oldest = best = Selection(keep, waits, lane.debt(keep))
    for candidate in _candidates(pool, lane, take):
        keep = candidate if bound is None else bound.within(candidate, pool.forced)
        later = lane.debt(keep)
        if later >= best.total:
            continue  # it has lost already, and to judge takes longer
        waits = judge(keep, best.total - later)
        if waits + later < best.total - 1e-9:
            best = Selection(keep, waits, later)
        if best.total <= tuning.GOOD_ENOUGH:
            break
    return [oldest] if best is oldest else [best, oldest]


def _candidates(pool: Pool, lane: Lane, take: int) -> Iterator[BoolArray]:
    """Where waiting comes from columns the DP; else the lane first."""
    if not pool.columns:
        yield from lane.candidates(take)
    yield _by_columns(pool, take)
    if pool.columns and pool.forced.any():
        yield _by_columns(pool, take, together=tuning.TOGETHER * pool.neighbours)


def _by_columns(pool: Pool, take: int, together: int = 0) -> BoolArray:
    """What the column DP keeps; the `together` heaviest go first, after what is forced."""
    order = pool.order
    x, forced = pool.cost[order], pool.forced[order]
    age = pool.age[order]
    late = tuning.LATE_IN_COLUMNS if pool.columns else tuning.LATE
    penalty = reduce(np.multiply, [age] * late)  # `**` takes several times as long
    penalty = penalty + 1000.0 * forced
    penalty[:together] += 100.0
    ripe = tuning.RIPE * age / (age + tuning.RIPENING)
    penalty = float(np.add.reduce(x)) / len(x) * penalty + ripe * _waits(x, pool.neighbours)
    price = tuning.SKIPS_IN_COLUMNS if pool.columns else tuning.SKIPS * take / (len(order) - take)
    keep = np.zeros(len(order), dtype=bool)
    keep[order] = column_dp(
        x, penalty, forced, take=take, G=pool.neighbours, band=pool.band, price=price
    )
    return keep


def _waits(x: FloatArray, G: int) -> FloatArray:
    """What each item of falling `x` waits, on average, in a column of G neighbours around it."""
    half = G // 2
    around = np.concatenate((x[:1].repeat(half), x, x[-1:].repeat(half)))
    waits: FloatArray = around[: len(x)] - around[2 * half :]
    return waits / 2
