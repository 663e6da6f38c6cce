"""Padded micro-batches that exchange items of several samples, one for one or for nothing.

Invariant: an item stays whole, no micro-batch gets more than `most` samples, and the result never
takes longer than what was given.

Groups that stay in one micro-batch often fit only as they were packed, long beside short. Each move
or swap of whole items is judged by what both micro-batches then cost: their longest sample as often
as they have samples. A micro-batch has an empty item besides, so that a move is a swap for that.
The cost of all counts a little as well: where several micro-batches are as dear as each other, no
single swap makes the step shorter.

Example, up to 4 samples on one rank, items of two samples, 9 and 1 beside 9 and 1: 36 + 36. A swap
of a 1 for a 9 leaves 9 9 beside 1 1: 36 + 4.
"""

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.split.padded.shared import Items
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import FloatArray, IntArray


def exchange_items(
    place: IntArray, items: Items, shape: tuple[int, int], work: Work, *, per_step: bool
) -> IntArray:
    """Place, rank * M + micro-step, of each item after swaps; `place` is that before them.

    items: in any order. shape: ranks, and micro-batches of each. work: pays for what is looked at.
    """
    swaps = _Swaps(place, items, shape, per_step)
    best, least = place, swaps.time()
    for weight in tuning.ALL_ITEMS:
        for _ in range(tuning.ITEM_SWAPS):
            if not swaps.make_one(weight, work):
                break
            time = swaps.time()
            if time < least * (1 - 1e-12):
                best, least = swaps.place[: len(place)].copy(), time
    return best


class _Swaps:
    """place: of each item, then of an empty one in each micro-batch; changed by swaps."""

    def __init__(
        self, place: IntArray, items: Items, shape: tuple[int, int], per_step: bool
    ) -> None:
        self.shape, self.bins, self.per_step = shape, shape[0] * shape[1], per_step
        self.most, self.items = items.most, len(place)
        self.place = np.concatenate((place, np.arange(self.bins)))
        self.longest = np.append(items.longest, np.zeros(self.bins))
        self.size = np.append(items.size, np.zeros(self.bins, dtype=np.int64))
        self.falling = np.argsort(-self.longest, kind="stable")
        self._measure()

    def _measure(self) -> None:
        """What micro-batches hold and cost, and what is longest there without each item."""
        by_place = self.falling[np.argsort(self.place[self.falling], kind="stable")]
        count = np.bincount(self.place, minlength=self.bins)
        first, longest = count.cumsum() - count, np.append(self.longest[by_place], 0.0)
        self.without = longest[first][self.place]
        self.without[by_place[first]] = np.where(count > 1, longest[first + 1], 0.0)
        self.held = np.bincount(self.place, weights=self.size, minlength=self.bins)
        self.cost = longest[first] * self.held

    def time(self) -> float:
        """What the step takes; micro-batches of like cost share a micro-step."""
        if self.per_step:
            return float(self.cost.reshape(self.shape).sum(axis=1).max())
        return float(np.sort(self.cost)[::-1][:: self.shape[0]].sum())

    def make_one(self, weight: float, work: Work) -> bool:
        """The best swap of an item that others wait for; whether there was one.

        weight: of what all micro-batches cost, beside what the step takes.
        """
        R, M = self.shape
        by_cost = np.argsort(-self.cost, kind="stable")
        dear = np.zeros(self.bins, dtype=bool)
        if self.per_step:
            dear.reshape(R, M)[self.cost.reshape(R, M).sum(axis=1).argmax()] = True
        else:
            dear[by_cost[::R]] = True
        one = np.flatnonzero(dear[self.place[: self.items]])[:, None]
        if not work.affords(tuning.ITEM_SWAP.of(len(one) * len(self.place), 0, 0)):
            return False
        here, there = self.place[one], self.place
        more = self.size - self.size[one]
        held = self.held[here] + more, self.held[there] - more
        cost_here = np.maximum(self.without[one], self.longest) * held[0]
        cost_there = np.maximum(self.without, self.longest[one]) * held[1]
        gone = self.cost[here] + self.cost[there]
        if self.per_step:
            before, after = self._of_ranks(here, cost_here, cost_there)
        else:
            before, after = self._of_steps(by_cost, here, cost_here, cost_there)
        after += weight / R * (cost_here + cost_there - gone)
        after[(here == there) | (np.maximum(*held) > self.most)] = np.inf
        best = int(after.argmin())
        if not after.ravel()[best] < before * (1 - 1e-9):
            return False
        i, other = np.unravel_index(best, after.shape)
        own = int(one[i, 0])
        to = int(self.place[other])
        if other < self.items:
            self.place[other] = self.place[own]
        self.place[own] = to
        self._measure()
        return True

    def _of_ranks(
        self, here: IntArray, cost_here: FloatArray, cost_there: FloatArray
    ) -> tuple[float, FloatArray]:
        """What the most loaded rank has, and what it or the other one has after each swap."""
        M, load = self.shape[1], self.cost.reshape(self.shape).sum(axis=1)
        high, other = int(load.argmax()), self.place // M
        own = load[high] - self.cost[here] + cost_here
        change = cost_there - self.cost[self.place]
        after = np.where(other == high, own + change, np.maximum(own, load[other] + change))
        return float(load[high]), after

    def _of_steps(
        self, by_cost: IntArray, here: IntArray, cost_here: FloatArray, cost_there: FloatArray
    ) -> tuple[float, FloatArray]:
        """What the micro-steps take, now and after each swap.

        here: micro-batches that are the dearest of theirs.
        """
        R, M = self.shape
        turn = np.empty(self.bins, dtype=np.int64)
        turn[by_cost] = np.arange(self.bins)
        step, nth = turn // R, (turn % R)[self.place]
        first, second, third = np.pad(self.cost[by_cost].reshape(M, R), ((0, 0), (0, 2))).T[:3]
        mine, theirs = step[here], step[self.place]
        apart = np.maximum(second[mine], cost_here) - first[mine]
        rest = np.where(nth == 0, second[theirs], first[theirs])
        apart += np.maximum(rest, cost_there) - first[theirs]
        rest = np.where(nth == 1, third[theirs], second[theirs])
        within = np.maximum(np.maximum(rest, cost_here), cost_there) - first[theirs]
        time = float(first.sum())
        return time, time + np.where(mine == theirs, within, apart)
