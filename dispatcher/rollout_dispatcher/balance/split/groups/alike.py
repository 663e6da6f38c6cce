"""Making ranks alike in their large samples, by swaps of whole groups.

Invariant: no swap raises the measure below, or takes a rank beyond its cap.

Where micro-batches are single samples (or padded to their longest), and sorted in each rank, the
sum over micro-steps of the largest is the area under the curve max over ranks of N_r(v), the
number of samples that rank r has above cost v. Cut into layers of cost, each rank has a vector of
what its samples reach into each layer; these add up over groups, so a swap of groups is judged by
two sums and a maximum a layer.

Example: groups 9 8, 9 8, 2 1 and 2 1 on two ranks: 9 9 8 8 beside 2 2 1 1 takes 34, and once one of
each is swapped 9 8 2 1 beside 9 8 2 1 takes 20.
"""

from itertools import pairwise

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.split.groups.assign import Groups
from rollout_dispatcher.balance.split.packing import members
from rollout_dispatcher.plan import FloatArray, IntArray


def layers_of(cost: FloatArray, group: IntArray) -> FloatArray:
    """What the samples of each group reach into each layer of cost, float64[groups, layers]."""
    falling = -np.sort(-cost)
    places = np.linspace(0, 1, tuning.LAYERS + 1)[1:] ** 2 * (len(falling) - 1)
    edges = np.unique(np.concatenate((falling[places.astype(np.int64)], [0.0, falling[0]])))
    reach = [
        np.bincount(group, weights=np.clip(cost, low, high) - low) for low, high in pairwise(edges)
    ]
    return np.array(reach, dtype=np.float64).reshape(len(reach), int(group.max()) + 1).T


def make_alike(rank_of: IntArray, layers: FloatArray, groups: Groups, R: int, cap: int) -> IntArray:
    """Rank of each group after the swaps. rank_of: of each group, before."""
    ids = members(rank_of, R)
    if R == 1 or not layers.size or ids.shape[1] ** 2 > tuning.ALIKE_PAIRS:
        return rank_of  # ranks of many groups are alike
    swaps = _Swaps(ids, layers, groups.weight, cap)
    for _ in range(tuning.ALIKE_SWAPS):
        if not swaps.make_one():
            break
    swapped = np.empty(len(rank_of) + 1, dtype=np.int64)
    swapped[ids] = np.arange(R)[:, None]
    return swapped[:-1]


class _Swaps:
    """ids: int64[R, slots], changed in place; empty slots reach nowhere and weigh nothing."""

    def __init__(self, ids: IntArray, layers: FloatArray, weight: IntArray, cap: int) -> None:
        self.ids = ids
        # [layer, rank, slot]: sums over layers then add up whole tables, not a few numbers each
        reach = np.vstack((layers, np.zeros(layers.shape[1])))[ids]
        self.reach = np.ascontiguousarray(np.moveaxis(reach, 2, 0))
        self.weight = np.append(weight, 0)[ids]
        self.ranks, self.room = self.reach.sum(axis=2), cap - self.weight.sum(axis=1)
        self.given_up = np.zeros(len(ids), dtype=bool)

    def make_one(self) -> bool:
        """The best swap of the rank that costs most alone; whether there may be another."""
        most = self.ranks.max(axis=1)
        time = float(most.sum())
        above = most - np.partition(self.ranks, -2, axis=1)[:, -2]
        alone = np.where(self.ranks == most[:, None], above[:, None], 0.0).sum(axis=0)
        alone[self.given_up] = 0.0
        high = int(alone.argmax())
        if alone[high] <= time * tuning.WORTH_A_SWAP:
            return False
        low = self._partners(high)
        after = self._after(high, low)
        best = int(after.argmin())
        if after.ravel()[best] >= time * (1 - 1e-9):
            self.given_up[high] = True
            return True
        self.given_up[:] = False
        u, i, v = np.unravel_index(best, after.shape)
        one, other = (high, int(u)), (int(low[i]), int(v))
        for array in (self.ids, self.weight, *self.reach):
            array[one], array[other] = array[other], array[one]
        more = self.weight[other] - self.weight[one]  # as they are now: what the high one gave
        self.room[high] += more
        self.room[other[0]] -= more
        ranks = [high, other[0]]
        self.ranks[:, ranks] = self.reach[:, ranks].sum(axis=2)
        return True

    def _partners(self, high: int) -> IntArray:
        """Ranks with the most room below the others, few if they hold many groups."""
        held = self.ranks.sum(axis=0)
        held[high] = np.inf
        count = min(max(tuning.ALIKE_PAIRS // self.ids.shape[1] ** 2, 1), len(held) - 1)
        return np.argsort(held, kind="stable")[:count]

    def _after(self, high: int, low: IntArray) -> FloatArray:
        """The measure after each swap, float64[slot of the high one, partner, slot]."""
        ranks = self.ranks
        gone = self.reach[:, high, :, None, None] - self.reach[:, low][:, None]
        after = ranks[:, low][:, None, :, None] + gone
        np.maximum(after, np.subtract(ranks[:, high, None, None, None], gone, out=gone), out=after)
        np.maximum(after, self._others(high, low)[:, None, :, None], out=after)
        time: FloatArray = after.sum(axis=0)
        more = self.weight[high][:, None, None] - self.weight[low]
        time[(more > self.room[low][:, None]) | (-more > self.room[high])] = np.inf
        return time

    def _others(self, high: int, low: IntArray) -> FloatArray:
        """Largest of each layer among all ranks but `high` and each of `low`, [layers, low]."""
        others = self.ranks.copy()
        others[:, high] = 0.0
        first, largest = others.argmax(axis=1), others.max(axis=1)
        others[np.arange(len(others)), first] = 0.0
        second = others.max(axis=1)
        without: FloatArray = np.where(low == first[:, None], second[:, None], largest[:, None])
        return without
