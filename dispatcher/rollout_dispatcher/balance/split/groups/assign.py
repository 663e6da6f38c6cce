"""Whole groups onto ranks, so that the most loaded rank has little: one construction after another.

Invariant: each group is on one rank, and no rank holds more than `cap` of what its groups weigh
(samples, or tokens).

Greedy (LPT), equal-count KK and unequal KK start from different ends and none is always best, so
all are levelled by swaps of whole groups and the caller takes what suits it. Equal-count KK shares
neighbours out, so that ranks are alike in their large samples too. Where groups are too heavy for
that, they go by falling weight: least loaded first, then best fit.

Example, R = 2, cap 4, loads 9 5 4 3 with weights 1 2 1 3: LPT gives 9 | 5 4 and has no room for the
3 beside them, so it joins the 9: 9 3 | 5 4; no swap gains.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.bounds import rank_bound
from rollout_dispatcher.balance.split.best_fit import best_fit
from rollout_dispatcher.balance.split.budget_fit import lpt_budget
from rollout_dispatcher.balance.split.karmarkar_karp import differencing_labels
from rollout_dispatcher.balance.split.leveling import swap_level
from rollout_dispatcher.balance.split.packing import members
from rollout_dispatcher.plan import FloatArray, IntArray

#: Falling loads, weights, R, cap -> rank of each group, None if one finds no room.
Build = Callable[[FloatArray, IntArray, int, int], IntArray | None]


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups as items: load float64[groups], cost of each, and weight int64[groups]."""

    load: FloatArray
    weight: IntArray

    @classmethod
    def of(cls, cost: FloatArray, weight: IntArray, group: IntArray) -> "Groups":
        """Sums over the members; group: dense group number of each sample."""
        load = np.bincount(group, weights=cost).astype(np.float64)
        return cls(load, np.bincount(group, weights=weight).astype(np.int64))


#: Rank of each group among R, which hold `cap` each, as a plain method has it; None: no room.
Share = Callable[[Groups, int, int], IntArray | None]


def assignments(groups: Groups, R: int, cap: int) -> Iterator[IntArray]:
    """Rank of each group, int64[groups], levelled, once for each way that keeps within `cap`.

    The cap is at least the weight of every group.
    """
    for build in (_least_loaded, _by_neighbours, _by_differences):
        yield from _built(build, groups, R, cap)


def least_loaded(groups: Groups, R: int, cap: int) -> Iterator[IntArray]:
    """The first of them, which is the one that can make do with little room."""
    yield from _built(_least_loaded, groups, R, cap)


def _built(build: Build, groups: Groups, R: int, cap: int) -> Iterator[IntArray]:
    order = np.argsort(-groups.load, kind="stable")
    x, w = groups.load[order], groups.weight[order]
    labels = build(x, w, R, cap)
    if labels is not None:
        yield _unsorted(_levelled(labels, x, w, R, cap), order)


def by_weight(groups: Groups, R: int, cap: int) -> Iterator[IntArray]:
    """Rank of each group: evenly by weight, levelled as far as that allows; else just fitting."""
    order = np.lexsort((-groups.load, -groups.weight))
    x, w = groups.load[order], groups.weight[order]
    labels = _within(lpt_budget(w.astype(np.float64), w, R, cap), w, R, cap)
    if labels is None:
        labels = _all_placed(best_fit(w, np.full(R, cap), cap))
    if labels is not None:
        yield _unsorted(_levelled(labels, x, w, R, cap), order)
        yield _unsorted(labels, order)


def greedily(groups: Groups, R: int, cap: int) -> IntArray | None:
    """Falling load, each to the least loaded rank."""
    return _plainly(_least_loaded, groups, R, cap)


def by_neighbours(groups: Groups, R: int, cap: int) -> IntArray | None:
    """Equal-count KK."""
    return _plainly(_by_neighbours, groups, R, cap)


def _plainly(build: Build, groups: Groups, R: int, cap: int) -> IntArray | None:
    order = np.argsort(-groups.load, kind="stable")
    labels = build(groups.load[order], groups.weight[order], R, cap)
    return None if labels is None else _unsorted(labels, order)


def in_turn(groups: Groups, R: int, cap: int) -> IntArray | None:
    """As they came, each to the next rank that has room."""
    return _in_turn(groups.load, groups.weight, R, cap)


def dearest_in_turn(groups: Groups, R: int, cap: int) -> IntArray | None:
    """The same by falling load."""
    return _plainly(_in_turn, groups, R, cap)


def _unsorted(labels: IntArray, order: IntArray) -> IntArray:
    rank_of = np.empty_like(labels)
    rank_of[order] = labels
    return rank_of


def _all_placed(labels: IntArray) -> IntArray | None:
    return None if (labels < 0).any() else labels


def _within(labels: IntArray | None, w: IntArray, R: int, cap: int) -> IntArray | None:
    if labels is None or np.bincount(labels, weights=w, minlength=R).max() > cap:
        return None
    return labels


def _least_loaded(x: FloatArray, w: IntArray, R: int, cap: int) -> IntArray | None:
    return _within(lpt_budget(x, w, R, cap), w, R, cap)


def _by_neighbours(x: FloatArray, w: IntArray, R: int, cap: int) -> IntArray | None:
    """Equal-count KK; items without cost fill the count up."""
    filled = np.append(x, np.zeros(-len(x) % R))
    return _within(differencing_labels(filled, R, equal_size=True)[: len(x)], w, R, cap)


def _by_differences(x: FloatArray, w: IntArray, R: int, cap: int) -> IntArray | None:
    return _within(differencing_labels(x, R, equal_size=False), w, R, cap)


def _in_turn(_x: FloatArray, w: IntArray, R: int, cap: int) -> IntArray | None:
    room = [cap] * R
    rank_of = np.empty(len(w), dtype=np.int64)
    for g, count in enumerate(w.tolist()):
        turn = next((r % R for r in range(g, g + R) if room[r % R] >= count), None)
        if turn is None:
            return None
        room[turn] -= count
        rank_of[g] = turn
    return rank_of


def _levelled(labels: IntArray, x: FloatArray, w: IntArray, R: int, cap: int) -> IntArray:
    """Swaps and moves of whole groups, many ranks at a time, then for the most loaded alone."""
    ids, bound = members(labels, R), rank_bound(-np.sort(-x), R)
    x, w = np.append(x, 0.0), np.append(w, 0)
    swap_level(ids[None], x, w, cap)
    _relieve(ids, x, w, cap, bound * (1 + tuning.TOLERANCE))
    levelled = np.empty(len(x), dtype=np.int64)
    levelled[ids] = np.arange(R)[:, None]
    return levelled[:-1]


def _relieve(ids: IntArray, x: FloatArray, w: IntArray, cap: int, enough: float) -> None:
    """The swap of the most loaded rank with any other that leaves the least, as long as it gains.

    ids: int64[R, slots], in place; the last item of `x` and `w` is the empty slot.
    """
    if ids.shape[0] * ids.shape[1] ** 2 > tuning.RELIEF_PAIRS:
        return  # ranks of many groups are level already
    cost, weight = x[ids], w[ids]
    loads, room = cost.sum(axis=1), cap - weight.sum(axis=1)
    for _ in range(tuning.RELIEFS):
        high = int(loads.argmax())
        if loads[high] <= enough:
            return
        less = cost[high][:, None, None] - cost  # [slot of the high one, rank, slot]
        more = weight[high][:, None, None] - weight
        after = np.maximum(loads[high] - less, loads[:, None] + less)
        after[(more > room[:, None]) | (-more > room[high])] = np.inf
        after[:, high] = np.inf
        best = int(after.argmin())
        if after.ravel()[best] >= loads[high] * (1 - 1e-12):
            return
        u, r, v = np.unravel_index(best, after.shape)
        for array in (ids, cost, weight):
            array[high, u], array[r, v] = array[r, v], array[high, u]
        for rank in (high, int(r)):
            loads[rank], room[rank] = cost[rank].sum(), cap - weight[rank].sum()
