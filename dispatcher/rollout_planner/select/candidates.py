"""Selection: which samples of the window this step takes.

Invariant: exactly `take` items, with every item that is due among them (as far as they fit):
nobody is skipped beyond its bound, now or in any later step that takes as many.

Candidates are tried from the least to the most selective, and the first that waits no more than
`GOOD_ENOUGH` ends the search, so that ages and lengths are disturbed only as far as it pays: the
oldest; the outlier lane; the column DP (columns.py), which looks for micro-steps of alike samples.
Where micro-steps have a fixed size there is the DP without the lane. Once something is due, the DP
is tried with the heaviest leaving together as well.

The outlier lane: a sample that costs more than a rank's share of the step makes every other rank
wait, whatever the partition. Together with the heaviest others it makes the step so much longer
that nobody waits for it. So some of the heaviest are held back, or they leave together. (WLB-LLM
delays outlier documents in the same spirit.) To hold many is tried before few; where no sample
rules a rank it is the shape of a packing that waits, which takes few to mend, and few come first.
How much a step's loss tokens may stray for it is for `loss_bound`.

What is held back may have to go without company when it is due: `debt` charges a candidate for
that, by how much less the item costs that is a column further down, but only in steps in which one
of the heaviest is due anyway.

Example: R = 2, take 4, window 20 2 2 2 2 2: the 20 alone with 2 2 2 waits 20 / 13 - 1 = 54 %. Held
until two more like it have come, 20 20 20 2 waits 40 / 31 - 1 = 29 %; with a fourth, 0.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rollout_planner import tuning
from rollout_planner.select.columns import tightest
from rollout_planner.select.loss_bound import LossBound
from rollout_planner.types import BoolArray, FloatArray, IntArray

#: Mask of the items to keep -> waiting of a good split of them, over the work of a mean batch.
Judge = Callable[[BoolArray], float]


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


@dataclass(frozen=True, slots=True)
class Pool:
    """What a selection chooses from, in arrival order: samples, or groups as one item each.

    cost: float64[n]. order: int64[n], items by falling cost. age: float64[n], skips suffered as a
    share of the bound. forced: bool[n], has to go now. neighbours: how many items of a micro-step
    should be alike. columns: whether waiting comes from differences inside micro-steps rather than
    from single outliers. share: what a rank has of a step.
    """

    cost: FloatArray
    order: IntArray
    age: FloatArray
    forced: BoolArray
    neighbours: int
    columns: bool
    share: float


def due(left: IntArray, must_go: BoolArray, take: int, size: IntArray) -> BoolArray:
    """Items that have to go now, most urgent first where they are more than `take` samples.

    For every j, of the samples with at most j skips left all but j * take go now: the j steps
    that remain before the last of them is due can take no more. What else must go does as far as
    these leave room: that nobody is passed over too often is a promise, and it is none.
    Example: take 2, skips left 0 1 1 1: the first is due, and of the four with at most one skip
    left 4 - 1 * 2 = 2 must go: the first and one more.
    """
    forced, samples = np.zeros(len(left), dtype=bool), int(size.sum())
    if samples > int(left.min(initial=samples)) * take:  # the first deadline leaves some no room
        rest = -(-samples // take)  # with so many skips left nothing has to go
        urgency = np.clip(left, 0, rest)
        held = np.bincount(urgency, weights=size).cumsum()
        need = float((held - np.arange(len(held)) * take).max())
        order = urgency.argsort(kind="stable")
        before = size[order].cumsum() - size[order]
        forced[order[before < min(need, take)]] = True
    if must_go.any():
        others = np.flatnonzero(must_go & ~forced)
        before = size[others].cumsum() - size[others] + int(size[forced].sum())
        forced[others[before < take]] = True
    return forced


def select(pool: Pool, take: int, judge: Judge, bound: LossBound | None = None) -> list[Selection]:
    """The `take` items that leave together with the least waiting; then the oldest.

    bound: all of them keep it as far as what is forced lets them.
    """
    found = []
    for candidate in of(pool, take):
        keep = candidate if bound is None else bound.within(candidate, pool.forced)
        found.append(Selection(keep, judge(keep), debt(pool, keep)))
        if found[-1].total <= tuning.GOOD_ENOUGH:
            break
    best = min(found, key=lambda each: each.total)
    return [best] if best is found[0] else [best, found[0]]


def of(pool: Pool, take: int) -> Iterator[BoolArray]:
    """The oldest; where waiting comes from outliers the lane; what the column DP keeps."""
    forced, order, spare = pool.forced, pool.order, len(pool.order) - take
    yield keep_oldest(forced, take)
    if spare <= 0:
        return
    outliers = bool(pool.cost.max() > pool.share)
    most = max(min(take // (tuning.HELD if outliers else tuning.HELD_FOR_SHAPE), spare), 1)
    counts = [most >> i for i in range(0, most.bit_length(), 2)][:: 1 if outliers else -1]
    for held in (0, *counts):
        for company in () if pool.columns else (0, *tuning.COMPANY):
            if (held and forced.any()) or bool(held) != bool(company):
                first = order[held : held + company * pool.neighbours]
                yield keep_oldest(forced, take, first, order[:held])
    x, age = pool.cost[order], pool.age[order]
    G, mean = pool.neighbours, float(x.mean())
    penalty = mean * age**2 + tuning.RIPE * age * _waits(x, G)
    penalty[forced[order]] += len(x) * x[0]
    for together in (0, tuning.WATCHED * G) if forced.any() else (0,):
        penalty[:together] += len(x) * mean
        yield keep_oldest(forced, take, order[tightest(x, penalty, take, G)])


def debt(pool: Pool, keep: BoolArray) -> float:
    """What the worst of the heaviest that stay behind may cost later, as excess."""
    heavy = pool.order[: (tuning.WATCHED + 1) * pool.neighbours]
    watched = heavy[: -pool.neighbours]
    if not pool.forced[watched].any():
        return 0.0
    less = pool.cost[watched] - pool.cost[heavy[pool.neighbours :]]
    charge = tuning.DEBT * pool.age[watched] * less / (pool.share or 1.0)
    return float(charge[~keep[watched]].max(initial=0.0))


def keep_oldest(
    forced: BoolArray, take: int, first: IntArray | None = None, last: IntArray | None = None
) -> BoolArray:
    """Mask of `take` items: those `forced`, then `first`, then the oldest, `last` at the end."""
    turn = np.full(len(forced), 2, dtype=np.int8)
    if last is not None:
        turn[last] = 3
    if first is not None:
        turn[first] = 1
    turn[forced] = 0
    keep = np.zeros(len(forced), dtype=bool)
    keep[turn.argsort(kind="stable")[:take]] = True
    return keep


def _waits(x: FloatArray, G: int) -> FloatArray:
    """What each item of falling `x` waits, on average, in a column of G neighbours around it."""
    half, i = G // 2, np.arange(len(x))
    waits: FloatArray = x[np.maximum(i - half, 0)] - x[np.minimum(i + half, len(x) - 1)]
    return waits / 2
