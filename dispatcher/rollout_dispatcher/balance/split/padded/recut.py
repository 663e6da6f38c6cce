"""Padded micro-batches of ranks that keep their samples: where each of them ends.

Invariant: every rank keeps its samples; its micro-batches are runs of them in falling order, within
their limit (or a single sample), as many as asked for and none empty unless its samples are fewer.

Where whole groups stay on ranks, neighbours in length cannot go to any rank that suits them; but a
rank may end its runs early. As full as the limit allows, a run may hold many short samples beside
one long. Which ends are best is a program over a rank's samples: where ranks meet once a step its
runs cost the least in all, where they meet at every micro-step they exceed what the other ranks
have there by the least. All ranks, or every other one, cut anew until none gains, from several cuts
to begin with.

Several splits are cut at once, ranks of all of them side by side: one that is behind with runs as
full as can be may be ahead with these. So plain splits are cut before they are compared, without
groups as well where ranks meet once a step; where they meet at every micro-step, samples that may
change ranks become `neighbours` instead.

Example, up to 3 samples, costs 9 2 2 1 on a rank with two micro-batches: 9 2 2 | 1 costs 27 + 1,
and 9 | 2 2 1 takes 9 + 6.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.micro_batch_order import rearranged
from rollout_dispatcher.balance.order import by_label
from rollout_dispatcher.balance.split.padded.ends import least_runs
from rollout_dispatcher.balance.split.padded.runs import most_in_run, places_of
from rollout_dispatcher.balance.split.parts import Batch, Parts, evenly, matrix, reduced
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import FloatArray, IntArray, PlanConfig, Sync


def recut(
    batch: Batch, splits: Sequence[Parts], config: PlanConfig, work: Work, *, alone: bool = False
) -> list[Parts]:
    """The best that runs which end elsewhere make of any of these, for each count of micro-batches.

    splits: the most promising first. work: pays for it, as far as it goes; the last ones are left
    out where it does not. alone: whether ranks cut as if they never waited for others, which is
    quick.
    """
    alone |= config.sync is Sync.STEP or config.dp_size == 1
    found = []
    for M in sorted({each.num_micro_batches for each in splits}):
        fewer = [_with_room(each, M) for each in splits if each.num_micro_batches <= M]
        found.append(_recut(batch, fewer, config, work, alone))
    return [each for each in found if each is not None]


def _with_room(parts: Parts, M: int) -> Parts:
    """With empty micro-batches up to so many."""
    missing = M - parts.num_micro_batches
    return Parts(parts.sequence, np.pad(parts.counts, ((0, 0), (0, missing)))) if missing else parts


def _recut(
    batch: Batch, splits: list[Parts], config: PlanConfig, work: Work, alone: bool
) -> Parts | None:
    M = splits[0].num_micro_batches
    if M == 1 or len(batch) == splits[0].counts.size * (config.micro_batch_size or 0):
        return None  # all are full, so runs end nowhere else
    most = _most(batch, config)
    while splits and not work.affords(_price(splits, int(most[-1]))):
        splits = splits[: len(splits) // 2]
    if not splits:
        return None
    ranks = _Ranks.of(batch, splits, most)
    cuts = ranks.cut(np.arange(len(splits)))
    found = [cuts.least(config)]
    if not alone:
        own = [-np.sort(-matrix(batch, each, config.layout), axis=1) for each in splits]
        found += _in_rounds(ranks, cuts, np.stack(own), config, work)
    return ranks.parts(min(found, key=lambda cut: cut.time))


def neighbours(batch: Batch, parts: Parts, config: PlanConfig) -> Parts:
    """As many samples in each micro-batch, but neighbours in length; then like with like.

    None costs more than before: what is longest in the second is no longer than the longest two.
    """
    (R, M), at = parts.counts.shape, np.empty(len(batch), dtype=np.int64)
    at[batch.dearest_first] = np.arange(len(batch))
    first = reduced(np.minimum, at, parts).ravel()
    first[parts.counts.ravel() == 0] = len(batch)
    turns = np.argsort(first, kind="stable")
    counts = parts.counts.ravel()[turns]
    load: FloatArray = np.append(batch.falling, 0.0)[counts.cumsum() - counts] * counts
    place = np.empty(R * M, dtype=np.int64)
    place[places_of(load, R, M, config.sync is Sync.STEP)] = np.arange(R * M)
    return rearranged(Parts(batch.dearest_first, counts.reshape(R, M)), place.reshape(R, M))


class _Cut(NamedTuple):
    """What it takes; number of the split; and of its runs, int64[R, M] and float64[R, M], the
    samples and the cost.
    """

    time: float
    of: int
    counts: IntArray
    cost: FloatArray


class _Cuts(NamedTuple):
    """of: int64[rows], the split that each is of. counts: int64[rows, R, M], samples of each run,
    and cost: float64[rows, R, M], what it takes.
    """

    of: IntArray
    counts: IntArray
    cost: FloatArray

    def time(self, config: PlanConfig) -> FloatArray:
        """What each takes, float64[rows], if every rank's runs are sorted by what they cost.

        As `step_time` says of one.
        """
        paces = self.cost
        if config.sync is Sync.MICRO_STEP:
            paces = np.sort(self.cost, axis=2).max(axis=1, keepdims=True)
        drained = (config.pipeline_stages - 1) * paces.max(axis=2)
        time: FloatArray = (paces.sum(axis=2) + drained).max(axis=1)
        return time

    def some(self, rows: IntArray) -> "_Cuts":
        """Those of these rows."""
        return _Cuts(self.of[rows], self.counts[rows], self.cost[rows])

    def least(self, config: PlanConfig) -> _Cut:
        """The one that takes least."""
        time = self.time(config)
        best = int(time.argmin())
        return _Cut(float(time[best]), int(self.of[best]), self.counts[best], self.cost[best])


@dataclass(frozen=True, slots=True)
class _Ranks:
    """What each rank of each split has, in falling order.

    sequence: int64[splits, n], samples rank by rank. sizes: int64[splits, R], how many each has.
    table: float64[width, splits, R, most of a rank], what a run of j + 1 samples costs that begins
    at i; inf where none may. M: runs of a rank.
    """

    sequence: IntArray
    sizes: IntArray
    table: FloatArray
    M: int

    @classmethod
    def of(cls, batch: Batch, splits: list[Parts], most: IntArray) -> "_Ranks":
        """Of micro-batches whose ranks are to stay as they are."""
        n, M = len(batch), splits[0].num_micro_batches
        sizes = np.stack([each.counts.sum(axis=1) for each in splits])
        places = np.stack([_by_rank(batch, each) for each in splits])
        at = np.arange(int(sizes.max()))
        first = sizes.cumsum(axis=1) - sizes
        own = np.minimum(first[:, :, None] + at, n - 1)
        own = places[np.arange(len(splits))[:, None, None], own]
        left = sizes[:, :, None] - at  # samples from here on; each other run takes one of them
        width = np.minimum(most[own], left)
        width = np.clip(width, 0, np.maximum(sizes - M + 1, 1)[:, :, None])
        length = np.arange(1, int(width.max()) + 1)[:, None, None, None]
        table = np.where(length <= width, length * batch.x[own], np.inf)
        return cls(batch.order[places], sizes, table, M)

    def price(self, rows: int) -> float:
        """Operations of cutting so many splits once."""
        return tuning.RECUT.of(rows * self.table[:, 0].size, self.M, self.M)

    def cut(self, of: IntArray, pace: FloatArray | None = None) -> _Cuts:
        """These splits; pace: float64[rows, R, M], what others take in each micro-step."""
        table, sizes = self.table[:, of], self.sizes[of]
        shape = (*sizes.shape, self.M)
        pace = None if pace is None else pace.reshape(-1, self.M)
        table = table.reshape(len(table), sizes.size, -1)
        counts, cost = least_runs(table, sizes.ravel(), self.M, pace)
        return _Cuts(of, counts.reshape(shape), cost.reshape(shape))

    def parts(self, cut: _Cut) -> Parts:
        """The dearest run of each rank first, whatever is longest there."""
        turns = np.argsort(-cut.cost, axis=1, kind="stable")
        source = np.arange(len(turns))[:, None] * self.M + turns
        return rearranged(Parts(self.sequence[cut.of], cut.counts), source)


def _price(splits: list[Parts], most: int) -> float:
    """Operations of cutting these for the first time, with runs of so many samples at most."""
    sizes = [each.counts.sum(axis=1) for each in splits]
    (R, M), longest = splits[0].counts.shape, max(int(each.max()) for each in sizes)
    size = len(splits) * R * longest * min(most, max(longest - M + 1, 1))
    return tuning.RECUT.of(size, M, M)


def _by_rank(batch: Batch, parts: Parts) -> IntArray:
    """Places among falling samples, rank by rank."""
    sizes = parts.counts.sum(axis=1)
    rank_of = np.empty(len(batch), dtype=np.int64)
    rank_of[parts.sequence] = np.repeat(np.arange(len(sizes)), sizes)
    return by_label(rank_of[batch.order], len(sizes))


def _most(batch: Batch, config: PlanConfig) -> IntArray:
    """Samples that a run may have which begins with each of falling samples."""
    if config.micro_batch_tokens is None:
        return np.full(len(batch), config.micro_batch_size or 1)
    return most_in_run(batch.s, config.micro_batch_tokens)


def _in_rounds(
    ranks: _Ranks, cheapest: _Cuts, own: FloatArray, config: PlanConfig, work: Work
) -> Iterator[_Cut]:
    """The best after each round, in which all ranks cut anew beside what others took before.

    From runs that cost the least in all, from what was there, and from runs of like counts; the
    better ones go on. own: float64[splits, R, M], what micro-batches take before.
    """
    of, least = np.tile(cheapest.of, 3), np.full(3 * len(own), np.inf)
    before = np.concatenate((cheapest.cost, own, _even(ranks)))
    last: _Cuts | None = None
    for _ in range(tuning.RECUT_ROUNDS):
        if not work.affords(ranks.price(len(of))):
            return
        cuts, kept = ranks.cut(of, _others(before)), -(-len(of) // tuning.RECUT_KEPT)
        if last is not None:
            cuts, least = _by_halves(cuts, last), np.tile(least, 3)
        yield cuts.least(config)
        time = cuts.time(config)
        gains = np.flatnonzero(time < least * (1 - 1e-9))
        if not len(gains):
            return
        gains = gains[np.argsort(time[gains], kind="stable")][:kept]
        last = cuts.some(gains)
        of, before, least = last.of, last.cost, time[gains]


def _by_halves(cuts: _Cuts, last: _Cuts) -> _Cuts:
    """These, and those in which only every other rank has cut anew since the last.

    Where all do, each beside what the others had, two may evade each other and meet again.
    """
    odd = np.arange(cuts.counts.shape[1])[:, None] % 2 == 1
    counts, cost = (
        np.concatenate((new, np.where(odd, new, old), np.where(odd, old, new)))
        for new, old in ((cuts.counts, last.counts), (cuts.cost, last.cost))
    )
    return _Cuts(np.tile(cuts.of, 3), counts, cost)


def _even(ranks: _Ranks) -> FloatArray:
    """What runs of like counts take, float64[splits, R, M], even if so many may not share one."""
    count = evenly(ranks.sizes, ranks.M)
    first = np.minimum(count.cumsum(axis=2) - count, ranks.table.shape[3] - 1)
    longest: FloatArray = np.where(count > 0, np.take_along_axis(ranks.table[0], first, 2), 0.0)
    return longest * count


def _others(cost: FloatArray) -> FloatArray:
    """The most that any other rank takes in each micro-step, float64[rows, R, M]."""
    second, first = np.moveaxis(np.partition(cost, -2, axis=1)[:, -2:], 1, 0)
    most: FloatArray = np.where(cost == first[:, None], second[:, None], first[:, None])
    return most
