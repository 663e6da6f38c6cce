"""Splitting when a group has to stay on one DP rank: groups onto ranks, then micro-batches.

Invariant: all samples of a group are on the same rank; micro-batches hold at most what they may,
and there are as many on every rank. With a fixed size these are the fewest that whole groups fit
into. With a token budget, where the last few tokens of room are dear, there may be more if the step
would take much longer otherwise.

Several ways to share groups out (assign.py) are ranked by what the step would take if samples
could be cut, then the best are split into micro-batches (levels.py). Example: R = 2, two
micro-batches of 2, groups of 3, 3 and 2 samples: the third fits nowhere, so there have to be three.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.objective import micro_batches_for
from rollout_dispatcher.balance.split.best_fit import best_fit
from rollout_dispatcher.balance.split.budgets.fewest import num_bins
from rollout_dispatcher.balance.split.groups.alike import layers_of, make_alike
from rollout_dispatcher.balance.split.groups.assign import (
    Groups,
    Share,
    assignments,
    by_weight,
    least_loaded,
)
from rollout_dispatcher.balance.split.groups.levels import (
    Ranks,
    agreed_levels,
    dealt,
    filled,
    runs,
)
from rollout_dispatcher.balance.split.packing import fewest_micro_batches
from rollout_dispatcher.balance.split.padded.recut import recut
from rollout_dispatcher.balance.split.padded.runs import begin_cost
from rollout_dispatcher.balance.split.parts import Batch, Parts, time_of
from rollout_dispatcher.balance.split.runs import cut_ranks
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import (
    FloatArray,
    IntArray,
    Layout,
    PlanConfig,
    Sync,
)


def split_by_rank(batch: Batch, group: IntArray, config: PlanConfig, work: Work) -> Parts:
    """Micro-batches of ranks that hold whole groups. group: dense group number of each sample.

    work: pays for trying more ways than the most promising one.
    """
    task = _Task.of(batch, group, config, work)
    if config.micro_batch_tokens is None:
        return _by_count(task)
    return (_by_padded_tokens if config.layout is Layout.PADDED else _by_tokens)(task)


def split_plainly(
    batch: Batch, group: IntArray, config: PlanConfig, share: Share, sequence: IntArray
) -> Parts:
    """The same as methods to compare with have it: ranks cut their samples, in this sequence."""
    return _plain_split(_Task.of(batch, group, config, Work(0.0)), share, sequence)


@dataclass(frozen=True, slots=True)
class _Task:
    """What is to be split. weight: what each sample takes of its micro-batch, at most `cap`."""

    batch: Batch
    group: IntArray
    groups: Groups
    weight: IntArray
    cap: int
    config: PlanConfig
    work: Work

    @classmethod
    def of(cls, batch: Batch, group: IntArray, config: PlanConfig, work: Work) -> "_Task":
        budget = config.micro_batch_tokens
        if budget is None:
            cap, weight = config.micro_batch_size or 1, np.ones(len(batch), dtype=np.int64)
        else:
            cap, weight = budget, np.minimum(batch.tokens, budget)
        groups = Groups.of(batch.cost, weight, group)
        return cls(batch, group, groups, weight, cap, config, work)

    @property
    def alike(self) -> bool:
        """Whether ranks wait for each other at every single sample, or for its padding."""
        config = self.config
        alone = config.micro_batch_size == 1 or config.layout is Layout.PADDED
        return alone and config.sync is Sync.MICRO_STEP

    def fewest(self) -> int:
        """Bound on the micro-batches of a rank: of the whole batch, and of its largest group."""
        config = self.config
        if config.micro_batch_tokens is None:
            M = micro_batches_for(len(self.batch), config)
        else:
            M = fewest_micro_batches(self.batch.tokens, config.dp_size, self.cap)
        return config.micro_batches(max(M, -(-int(self.groups.weight.max()) // self.cap)))

    def counts(self, least: int) -> Iterator[int]:
        """Micro-batches of a rank to try under a token budget: the least, then what is likely.

        Hardly any way finds room for the whole batch in many fewer than best fit needs.
        """
        yield least
        falling = -np.sort(-self.weight)
        bins = num_bins(best_fit(falling, np.full(len(falling), self.cap), self.cap))
        likely = -(-int(bins * (1 - tuning.BEST_FIT_OVER)) // self.config.dp_size) - 1
        multiple = self.config.micro_batch_multiple
        yield from count(max(least + multiple, self.config.micro_batches(likely)), multiple)

    def ranks(self, ways: Iterable[IntArray]) -> list[Ranks]:
        """Samples of the ranks, for each way to share groups out."""
        R = self.config.dp_size
        return [Ranks.of(self.batch, self.weight, way[self.group], R) for way in ways]

    def time(self, parts: Parts) -> float:
        """What the step takes, in cost."""
        return time_of(self.batch, parts, self.config)

    def samples(self, way: IntArray, sequence: IntArray) -> list[IntArray]:
        """Samples of each rank, in this sequence, for a way to share groups out."""
        of = way[self.group[sequence]]
        return [sequence[of == r] for r in range(self.config.dp_size)]

    def estimate(self, ranks: Ranks, M: int) -> float:
        """What the step takes if samples could be cut, all but the largest of a micro-step."""
        if self.config.sync is Sync.STEP:
            return float(ranks.cost.sum(axis=1).max())
        return float(self.levels(ranks, M).sum())

    def levels(self, ranks: Ranks, M: int) -> FloatArray:
        """What each micro-step should cost these ranks."""
        return agreed_levels(ranks.cost, M, single=self.config.micro_batch_size == 1)

    def best(self, ways: list[Ranks], M: int) -> Parts | None:
        """Micro-batches of the first of these ways that fit, best first; None if none does."""
        if self.config.layout is Layout.PADDED:
            return self.best_padded(ways, M)
        most = tuning.WAYS_TRIED if len(self.batch) <= tuning.WAYS_TRIED_UP_TO else 1
        found: list[Parts] = []
        for ranks in sorted(ways, key=lambda ranks: self.estimate(ranks, M)):
            if found and not self.affords_another(M):
                break
            found += self.micro_batches(ranks, M)
            if len(found) >= most:
                break
        return min(found, key=self.time, default=None)

    def best_padded(self, ways: list[Ranks], M: int) -> Parts | None:
        """The same, where it takes no time to cut all of them anew where padding costs least."""
        m = self.config.micro_batch_size or 1
        found = sorted((min(runs(ranks, M, m), key=self.time) for ranks in ways), key=self.time)
        if found and m > 1:
            found += recut(self.batch, found, self.config, self.work, alone=True)
        return min(found, key=self.time, default=None)

    @property
    def cuts(self) -> bool:
        """Whether samples just go in turn, or with their neighbours, which takes no time."""
        m, per_step = self.config.micro_batch_size, self.config.sync is Sync.STEP
        return m is not None and (per_step or m == 1 or self.config.layout is Layout.PADDED)

    def affords_another(self, M: int) -> bool:
        """Whether one more way may be split, and another selection after it."""
        n, R = len(self.batch), self.config.dp_size
        price, leaving = tuning.FILL_RANKS.of(n, R, M), tuning.SPLIT_BY_TOKENS.of(n, R, M)
        return self.cuts or self.work.affords(price, leaving)

    def micro_batches(self, ranks: Ranks, M: int) -> list[Parts]:
        """Splits of these ranks into M micro-batches each; none if one of them finds no room."""
        m, per_step = self.config.micro_batch_size, self.config.sync is Sync.STEP
        if m is not None and (m == 1 or self.config.layout is Layout.PADDED):
            return runs(ranks, M, m)
        if m is not None and per_step:
            return [dealt(ranks, M, m)]
        levels = None if per_step else self.levels(ranks, M)
        parts = filled(ranks, M, self.cap, levels, self.work)
        return [] if parts is None else [parts]


def _by_count(task: _Task) -> Parts:
    """The fewest micro-batches of a fixed size that whole groups fit into."""
    M, R = task.fewest(), task.config.dp_size
    while True:
        cap = M * task.cap
        ways = list(assignments(task.groups, R, cap)) or list(by_weight(task.groups, R, cap))
        if ways and task.alike:
            ways.append(_alike(task, ways, M))
        found = task.best(task.ranks(ways), M)
        if found is not None:
            return found
        M += task.config.micro_batch_multiple


def _alike(task: _Task, ways: list[IntArray], M: int) -> IntArray:
    """The best of these ways, whose ranks swap groups until they have alike samples."""
    best = min(ways, key=lambda way: task.estimate(task.ranks([way])[0], M))
    layers = layers_of(task.batch.cost, task.group)
    return make_alike(best, layers, task.groups, task.config.dp_size, M * task.cap)


def _by_tokens(task: _Task) -> Parts:
    """Ways that are good without a cap, with the micro-batches they need; fewer if others do well.

    Example: four micro-batches hold what the best way gives each rank; three hold it if ranks have
    the same tokens. These will do if the step takes not much longer.
    """
    R = task.config.dp_size
    free = task.ranks(assignments(task.groups, R, len(task.batch) * task.cap))
    least = task.fewest()
    enough = tuning.WORTH_A_MICRO_BATCH * min(task.estimate(ranks, least) for ranks in free)
    for M in task.counts(least):
        cap = M * task.cap
        found = task.best([ranks for ranks in free if ranks.heaviest <= cap], M)
        if found is not None:
            return found
        for ways in _tight(task.groups, R, cap):
            worth = [each for each in task.ranks(ways) if task.estimate(each, M) <= enough]
            found = task.best(worth, M)
            if found is not None and task.time(found) <= enough:
                return found
    raise AssertionError("some count holds whatever ranks have")


def _by_padded_tokens(task: _Task) -> Parts:
    """The way whose ranks, each of which cuts its own samples in falling order, take least.

    With what it costs to begin their micro-steps.
    """
    batch, config = task.batch, task.config
    begin = begin_cost(batch.x, batch.s, task.cap)
    ways = assignments(task.groups, config.dp_size, len(batch) * task.cap)
    found = [cut_ranks(task.samples(way, batch.order), 1, batch, config) for way in ways]

    def rating(parts: Parts) -> float:
        return task.time(parts) + begin * parts.num_micro_batches

    found.sort(key=rating)
    return min((*found, *recut(batch, found, config, task.work, alone=True)), key=rating)


def _tight(groups: Groups, R: int, cap: int) -> Iterator[Iterator[IntArray]]:
    """Ways to share groups out that keep to the cap; then with some room left; then by weight."""
    if int(groups.weight.sum()) > R * cap:
        return
    yield least_loaded(groups, R, cap)
    tighter = (-(-int(groups.weight.sum()) // R) + cap) // 2
    yield least_loaded(groups, R, max(tighter, int(groups.weight.max())))
    yield by_weight(groups, R, cap)


def _plain_split(task: _Task, share: Share, sequence: IntArray) -> Parts:
    config, groups, R = task.config, task.groups, task.config.dp_size
    M = task.fewest() if config.micro_batch_size else len(task.batch)
    while True:
        way = share(groups, R, M * task.cap)
        if way is None:
            way = next(by_weight(groups, R, M * task.cap), None)
        if way is not None:
            return cut_ranks(task.samples(way, sequence), M, task.batch, config)
        M += config.micro_batch_multiple
