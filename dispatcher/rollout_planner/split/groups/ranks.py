"""Splitting when a group has to stay on one DP rank: groups onto ranks, then micro-batches.

Invariant: all samples of a group are on the same rank; micro-batches hold at most what they may, or
a single sample that alone exceeds it, and there are as many on every rank: the fewest for which a
way is found.

Groups are shared out (share.py) by each way, then each rank's samples are filled into its
micro-batches: dearest first, to levels that ranks agree on where they wait at every micro-step;
swaps inside ranks level what is left. Padded ones are runs of neighbours. The way that takes the
least time is the plan.

Example, R = 2, M = 2: ranks with costs 9 2 1 and 6 3 3 agree on 9 and 3, so they have 9 | 2 1 and
6 3 | 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_planner import tuning
from rollout_planner.objective import micro_batches_for
from rollout_planner.order import by_label
from rollout_planner.split.assign import best_fit, lpt_budget
from rollout_planner.split.groups.share import (
    Share,
    by_differences,
    by_neighbours,
    by_weight,
    greedily,
    layers_of,
    levelled,
    swapped,
)
from rollout_planner.split.karmarkar_karp import differencing_labels
from rollout_planner.split.leveling import swap_level
from rollout_planner.split.packing import fewest_micro_batches, members
from rollout_planner.split.padded.recut import recut
from rollout_planner.split.padded.runs import begin_cost
from rollout_planner.split.parts import Batch, Parts, time_of
from rollout_planner.split.runs import cut_ranks
from rollout_planner.types import FloatArray, IntArray, Layout, PlanConfig, Sync, cut
from rollout_planner.work import Work

SHARES = (greedily, by_neighbours, by_differences)


def split_by_rank(batch: Batch, group: IntArray, config: PlanConfig, work: Work) -> Parts:
    """Micro-batches of ranks that hold whole groups. group: dense group number of each sample.

    work: pays for trying more ways than the most promising one.
    """
    task = _Task.of(batch, group, config)
    M, free, enough = task.fewest(), list[IntArray](), np.inf
    if config.micro_batch_tokens is not None:
        free = task.ways(len(batch) * task.cap, SHARES)
        enough = tuning.WORTH_A_MICRO_BATCH * min(task.estimate(way, M) for way in free)
    while True:
        room = M * task.cap
        ways = [way for way in free if task.cuts or task.most_held(way) <= room]
        if not ways:
            found = task.ways(room, SHARES[:1] if free else SHARES)
            ways = [way for way in found if task.estimate(way, M) <= enough]
        if ways and (parts := task.split(ways, M, work)) is not None:
            return parts
        M += config.micro_batch_multiple


def split_plainly(
    batch: Batch, group: IntArray, config: PlanConfig, share: Share, sequence: IntArray
) -> Parts:
    """The same as methods to compare with have it: ranks cut their samples, in this sequence."""
    task = _Task.of(batch, group, config)
    M = task.fewest() if config.micro_batch_size else len(batch)
    while True:
        limits = config.dp_size, M * task.cap
        way = share(task.load, task.held, *limits)
        if way is None:
            way = by_weight(task.load, task.held, *limits)
        if way is not None:
            return cut_ranks(task.samples(way, sequence), M, batch, config)
        M += config.micro_batch_multiple


@dataclass(frozen=True, slots=True)
class _Task:
    """What is to be split. weight: what each sample takes of its micro-batch, at most `cap`; load
    and held: what the samples of each group cost and take together.
    """

    batch: Batch
    group: IntArray
    config: PlanConfig
    weight: IntArray
    cap: int
    load: FloatArray
    held: IntArray

    @classmethod
    def of(cls, batch: Batch, group: IntArray, config: PlanConfig) -> "_Task":
        budget = config.micro_batch_tokens
        if budget is None:
            cap, weight = config.micro_batch_size or 1, np.ones(len(batch), dtype=np.int64)
        else:
            cap, weight = budget, np.minimum(batch.tokens, budget)
        load = np.bincount(group, weights=batch.cost).astype(np.float64)
        held = np.bincount(group, weights=weight).astype(np.int64)
        return cls(batch, group, config, weight, cap, load, held)

    @property
    def waits_often(self) -> bool:
        """Whether ranks wait for each other at every micro-step."""
        return self.config.sync is Sync.MICRO_STEP

    @property
    def cuts(self) -> bool:
        """Whether a rank's micro-batches are runs of neighbours: they may be any, or pad."""
        config = self.config
        alone = config.layout is Layout.PADDED or config.micro_batch_size == 1
        counted = config.micro_batch_size is not None and config.pipeline_stages == 1
        return alone or (counted and not self.waits_often)

    def fewest(self) -> int:
        """Bound on the micro-batches of a rank: of the whole batch, and of its largest group."""
        config = self.config
        if config.micro_batch_tokens is None:
            M = micro_batches_for(len(self.batch), config)
        else:
            M = fewest_micro_batches(self.batch.tokens, config.dp_size, self.cap)
        return config.micro_batches(max(M, -(-int(self.held.max()) // self.cap)))

    def ways(self, cap: int, shares: Sequence[Share]) -> list[IntArray]:
        """Rank of each group, int64[groups], by each of these that finds room for all."""
        load, held, R = self.load, self.held, self.config.dp_size
        if held.sum() > R * cap:
            return []
        found = [share(load, held, R, cap) for share in shares]
        if all(way is None for way in found):
            found = [by_weight(load, held, R, cap)]
        return [levelled(load, held, way, R, cap) for way in found if way is not None]

    def most_held(self, way: IntArray) -> int:
        """What the rank with the heaviest groups has of them."""
        return int(np.bincount(way, weights=self.held).max())

    def estimate(self, way: IntArray, M: int) -> float:
        """What the step takes if samples could be cut, all but the largest of a micro-step."""
        if not self.waits_often:
            return float(np.bincount(way, weights=self.load).max())
        return float(self.levels(self.samples(way, self.batch.order), M).sum())

    def samples(self, way: IntArray, sequence: IntArray) -> list[IntArray]:
        """Samples of each rank, in this sequence, for a way to share groups out."""
        of, R = way[self.group[sequence]], self.config.dp_size
        return cut(sequence[by_label(of, R)], np.bincount(of, minlength=R).tolist())

    def split(self, ways: list[IntArray], M: int, work: Work) -> Parts | None:
        """The best micro-batches that ranks have by these ways; None if none finds room."""
        batch, config, found = self.batch, self.config, list[Parts]()
        begin = begin_cost(batch.x, batch.s, self.cap) if config.pads_to_budget else 0.0

        def rating(parts: Parts) -> float:
            return time_of(batch, parts, config) + begin * parts.num_micro_batches

        if self.cuts:
            found = [self.cut(way, M) for way in ways]
            if self.waits_often and config.micro_batch_tokens is None:
                best = int(np.argmin([rating(parts) for parts in found]))
                layers = layers_of(batch.cost, self.group)
                alike = swapped(ways[best], layers, self.held, config.dp_size, M * self.cap)
                found.append(self.cut(alike, M))
            found.sort(key=rating)
            if config.layout is Layout.PADDED and config.micro_batch_size != 1:
                found += [recut(batch, each, config, work) for each in found[: tuning.RECUT_SPLITS]]
            return min(found, key=rating)
        price = tuning.GROUPS_BY_TOKENS.of(len(batch), config.dp_size, M)
        leaving = tuning.SPLIT_BY_TOKENS.of(len(batch), config.dp_size, M)
        for way in sorted(ways, key=lambda way: self.estimate(way, M)):
            if found and not work.affords(price, leaving):
                break
            parts = self.filled(self.samples(way, batch.order), M, work)
            found += [] if parts is None else [parts]
        return min(found, key=rating, default=None)

    def cut(self, way: IntArray, M: int) -> Parts:
        """Runs of neighbours on each rank, as full as can be."""
        return cut_ranks(self.samples(way, self.batch.order), M, self.batch, self.config)

    def levels(self, ranks: list[IntArray], M: int) -> FloatArray:
        """What each of M micro-steps should cost, falling: the largest sample that any rank has
        left, or an even share of what the most loaded rank has left.
        """
        cost, levels = self.batch.cost, np.empty(M)
        left = max(float(cost[ids].sum()) for ids in ranks)
        if not self.waits_often:
            return np.full(M, left / M)
        largest = np.zeros(M)
        for ids in ranks:
            first = cost[ids[:M]]
            np.maximum(largest[: len(first)], first, out=largest[: len(first)])
        for j in range(M):
            levels[j] = max(float(largest[j]), left / (M - j))
            left = max(left - levels[j], 0.0)
        return levels

    def filled(self, ranks: list[IntArray], M: int, work: Work) -> Parts | None:
        """M micro-batches of each of these ranks, falling by cost; None if one finds no room.

        work: pays for unequal KK in each, where micro-batches that should be alike are not.
        """
        cost, weight, cap, levels = self.batch.cost, self.weight, self.cap, self.levels(ranks, M)
        place = np.empty(len(cost), dtype=np.int64)
        for r, ids in enumerate(ranks):
            labels = _to_levels(cost[ids], weight[ids], cap, levels[0] - levels)
            if labels is None:
                return None
            place[ids] = labels + r * M
        best, n, price = self.levelled(place, levels), len(cost), tuning.KK_BY_COUNT
        if self.is_uneven(best, levels) and work.affords(price.of(n, len(ranks), M)):
            for r, ids in enumerate(ranks):
                labels = differencing_labels(cost[ids], M, equal_size=False)
                if np.bincount(labels, weights=weight[ids], minlength=M).max() <= cap:
                    place[ids] = labels + r * M
            best = min(best, self.levelled(place, levels), key=self.time)
        return Parts(best[best < n], (best < n).sum(axis=2))

    def is_uneven(self, bins: IntArray, levels: FloatArray) -> bool:
        """Whether these take longer than levels that are all alike."""
        close, alike = 1 + tuning.AS_THOUGHT, levels[0] <= (1 + tuning.AS_THOUGHT) * levels[-1]
        return self.waits_often and bool(alike) and self.time(bins) > close * float(levels.sum())

    def levelled(self, place: IntArray, levels: FloatArray) -> IntArray:
        """Micro-batches int64[R, M, slots] of samples in these places, after swaps inside ranks.

        To the levels; or to what ranks have on average, where one has no room to reach them.
        """
        M, R = len(levels), self.config.dp_size
        x, w = np.append(self.batch.cost, 0.0), np.append(self.weight, 0)
        best = bins = self.falling(members(place, R * M).reshape(R, M, -1))
        enough = float(levels.sum()) * (1 + tuning.LEVEL_PACKING) if self.waits_often else np.inf
        for target in (levels, x[bins].sum(axis=2).mean(axis=0)):
            if self.time(best) > enough:
                other, base = bins.copy(), np.broadcast_to(target[0] - target, (R, M))
                rounds, level = tuning.PACKING_ROUNDS, tuning.LEVEL_PACKING
                swap_level(other, x, w, self.cap, base=base, enough=level, rounds=rounds)
                best = min(best, self.falling(other), key=self.time)
        return best

    def costs(self, bins: IntArray) -> FloatArray:
        """Cost of each micro-batch; bins: int64[R, M, slots]."""
        costs: FloatArray = np.append(self.batch.cost, 0.0)[bins].sum(axis=2)
        return costs

    def falling(self, bins: IntArray) -> IntArray:
        """Each rank's micro-batches by falling cost."""
        order = np.argsort(-self.costs(bins), axis=1, kind="stable")
        return np.take_along_axis(bins, order[:, :, None], 1)

    def time(self, bins: IntArray) -> float:
        """What these take where ranks wait at every micro-step."""
        return float(self.costs(bins).max(axis=0).sum())


def _to_levels(x: FloatArray, w: IntArray, cap: int, below: FloatArray) -> IntArray | None:
    """Micro-batch of each of one rank's samples: to the levels, evenly by weight, or tightly.

    below: what each micro-batch should cost less than the first.
    """
    M = len(below)
    labels = lpt_budget(x, w, M, cap, start=below)
    if labels is None:
        labels = lpt_budget(w.astype(np.float64), w, M, cap)
    if labels is None:
        labels = best_fit(w, np.full(M, cap), cap)
    return None if labels.min(initial=0) < 0 else labels
