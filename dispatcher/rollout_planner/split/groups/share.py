"""Whole groups onto ranks: plain ways, and swaps that make ranks cost less or be more alike.

Invariant: each group is on one rank, no rank holds more than `cap` of what its groups weigh
(samples, or tokens), and no swap raises what it is judged by.

Where ranks wait once a step, that is the most loaded rank. Where they wait at every micro-step,
ranks should be alike in their large samples as well: sorted, single samples take the area under
the curve max over ranks of N_r(v), the number of samples that rank r has above cost v. Cut into
layers of cost, each rank has a vector of what its samples reach into each layer; these add up over
groups, and the sum over layers of the largest is the measure. With one layer it is the load.

Example: groups 9 8, 9 8, 2 1 and 2 1 on two ranks: 9 9 8 8 beside 2 2 1 1 takes 34, and once one of
each is swapped 9 8 2 1 beside 9 8 2 1 takes 20.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from rollout_planner import tuning
from rollout_planner.split.assign import best_fit, lpt_budget
from rollout_planner.split.karmarkar_karp import differencing_labels
from rollout_planner.split.leveling import swap_level
from rollout_planner.split.packing import bin_of_each, members
from rollout_planner.types import FloatArray, IntArray

#: Cost of each group, what it weighs, R, cap -> rank of each group; None: no room.
Share = Callable[[FloatArray, IntArray, int, int], IntArray | None]


def greedily(load: FloatArray, weight: IntArray, R: int, cap: int) -> IntArray | None:
    """Falling load, each to the least loaded rank."""
    order = np.argsort(-load, kind="stable")
    return _placed(lpt_budget(load[order], weight[order], R, cap), order, weight, R, cap)


def by_neighbours(load: FloatArray, weight: IntArray, R: int, cap: int) -> IntArray | None:
    """Equal-count KK; groups without cost fill the count up."""
    order = np.argsort(-load, kind="stable")
    labels = differencing_labels(np.append(load[order], np.zeros(-len(load) % R)), R, True)
    return _placed(labels[: len(load)], order, weight, R, cap)


def by_differences(load: FloatArray, weight: IntArray, R: int, cap: int) -> IntArray | None:
    """Unequal KK."""
    labels = differencing_labels(load, R, equal_size=False)
    return _placed(labels, np.arange(len(load)), weight, R, cap)


def in_turn(_load: FloatArray, weight: IntArray, R: int, cap: int) -> IntArray | None:
    """As they came, each to the next rank that has room."""
    room = [cap] * R
    rank_of = np.empty(len(weight), dtype=np.int64)
    for g, count in enumerate(weight.tolist()):
        turn = next((r % R for r in range(g, g + R) if room[r % R] >= count), None)
        if turn is None:
            return None
        room[turn] -= count
        rank_of[g] = turn
    return rank_of


def dearest_in_turn(load: FloatArray, weight: IntArray, R: int, cap: int) -> IntArray | None:
    """The same by falling load."""
    order = np.argsort(-load, kind="stable")
    return _placed(in_turn(load, weight[order], R, cap), order, weight, R, cap)


def by_weight(load: FloatArray, weight: IntArray, R: int, cap: int) -> IntArray | None:
    """Evenly by weight, or just fitting: for groups too heavy for the others."""
    order = np.lexsort((-load, -weight))
    w = weight[order]
    even = _placed(lpt_budget(w.astype(np.float64), w, R, cap), order, weight, R, cap)
    return (
        _placed(best_fit(w, np.full(R, cap), cap), order, weight, R, cap) if even is None else even
    )


def _placed(
    labels: IntArray | None, order: IntArray, weight: IntArray, R: int, cap: int
) -> IntArray | None:
    """Rank of each group from labels in this order; None if one has none, or a rank too much."""
    if labels is None or labels.min() < 0:
        return None
    rank_of = np.empty_like(labels)
    rank_of[order] = labels
    return None if np.bincount(rank_of, weights=weight, minlength=R).max() > cap else rank_of


def layers_of(cost: FloatArray, group: IntArray) -> FloatArray:
    """What the samples of each group reach into each layer of cost, float64[groups, layers]."""
    falling = -np.sort(-cost)
    places = np.linspace(0, 1, tuning.LAYERS + 1)[1:] ** 2 * (len(falling) - 1)
    edges = np.unique(np.concatenate((falling[places.astype(np.int64)], [0.0, falling[0]])))
    reach = [
        np.bincount(group, weights=np.clip(cost, low, high) - low) for low, high in pairwise(edges)
    ]
    return np.array(reach, dtype=np.float64).reshape(len(reach), int(group.max()) + 1).T


def levelled(load: FloatArray, weight: IntArray, rank_of: IntArray, R: int, cap: int) -> IntArray:
    """Rank of each group after swaps of many ranks at a time, then of the most loaded alone."""
    ids = members(rank_of, R)
    swap_level(ids[None], np.append(load, 0.0), np.append(weight, 0), cap)
    return swapped(bin_of_each(ids, len(load)), load[:, None], weight, R, cap)


def swapped(rank_of: IntArray, layers: FloatArray, weight: IntArray, R: int, cap: int) -> IntArray:
    """Rank of each group after the best swaps of the rank that adds most to the measure.

    layers: float64[groups, layers]. With a single one, the load, a swap need only relieve one of
    several ranks that have the most.
    """
    ids, L = members(rank_of, R), layers.shape[1]
    partners = tuning.SWAPS_COMPARED // max(ids.shape[1] ** 2 * L, 1)
    if R == 1 or not partners or not L:
        return rank_of  # ranks of many groups are alike
    # [layer, rank, slot]: sums over layers then add up whole tables, not a few numbers each
    reach = np.moveaxis(np.vstack((layers, np.zeros(L)))[ids], 2, 0).copy()
    held = np.append(weight, 0)[ids]
    ranks, room = reach.sum(axis=2), cap - held.sum(axis=1)
    even, done = float(ranks.sum()) / R, np.zeros(R, dtype=bool)
    for _ in range(tuning.GROUP_SWAPS):
        most, time = ranks.max(axis=1), float(ranks.max(axis=1).sum())
        above = most - np.partition(ranks, -2, axis=1)[:, -2] if L > 1 else most
        alone = np.where(ranks == most[:, None], above[:, None], 0.0).sum(axis=0)
        alone[done] = 0.0
        high = int(alone.argmax())
        if not alone[high] or time <= even * (1 + tuning.TOLERANCE):
            break
        total = ranks.sum(axis=0)
        total[high] = np.inf
        low = np.argsort(total, kind="stable")[: min(partners, R - 1)]
        others = _others(ranks, high, low) if L > 1 else np.zeros((1, len(low)))
        mine, theirs = ranks[:, high, None], ranks[:, low]
        before = np.maximum(np.maximum(mine, theirs), others).sum(axis=0)
        less = reach[:, high, :, None, None] - reach[:, low][:, None]
        after = theirs[:, None, :, None] + less
        np.maximum(after, np.subtract(mine[..., None, None], less, out=less), out=after)
        gain = before[:, None] - np.maximum(after, others[:, None, :, None], out=after).sum(axis=0)
        more = held[high][:, None, None] - held[low]
        gain[(more > room[low][:, None]) | (-more > room[high])] = 0.0
        best = int(gain.argmax())
        done[high] = gain.ravel()[best] <= tuning.TOLERANCE * time
        if done[high]:
            continue
        done[:] = False
        u, i, v = np.unravel_index(best, gain.shape)
        one, other = (high, int(u)), (int(low[i]), int(v))
        for array in (ids, held, *reach):
            array[one], array[other] = array[other], array[one]
        both = [high, other[0]]
        ranks[:, both] = reach[:, both].sum(axis=2)
        room[both] = cap - held[both].sum(axis=1)
    return bin_of_each(ids, len(rank_of))


def _others(ranks: FloatArray, high: int, low: IntArray) -> FloatArray:
    """Largest of each layer among all ranks but `high` and each of `low`, [layers, low]."""
    others = ranks.copy()
    others[:, high] = 0.0
    first, largest = others.argmax(axis=1), others.max(axis=1)
    others[np.arange(len(others)), first] = 0.0
    second = others.max(axis=1)
    found: FloatArray = np.where(low == first[:, None], second[:, None], largest[:, None])
    return found
