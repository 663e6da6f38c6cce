"""Padded micro-batches of ranks that keep their samples: where each of them ends.

Invariant: every rank keeps its samples; its micro-batches are runs of them in falling order, within
their limit (or a single sample), none empty unless its samples are fewer; the result never takes
longer than what was given.

Where whole groups stay on ranks, neighbours in length cannot go to any rank that suits them; but a
rank may end its runs early. Which ends are best is a program over a rank's samples: where ranks
meet once a step its runs cost the least in all, where they meet at every micro-step they exceed
what the other ranks have there by the least. All ranks, or every other one, cut anew until none
gains. Ranks lie side by side, so that many take hardly longer than one.

Example, up to 3 samples, costs 9 2 2 1 on a rank with two micro-batches: 9 2 2 | 1 costs 27 + 1,
and 9 | 2 2 1 takes 9 + 6.
"""

from dataclasses import dataclass

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import by_label
from rollout_planner.split.padded.runs import begin_cost, most_in_run
from rollout_planner.split.parts import Batch, Parts, evenly, time_of
from rollout_planner.types import FloatArray, IntArray, PlanConfig, Sync, step_time
from rollout_planner.work import Work


def recut(batch: Batch, parts: Parts, config: PlanConfig, work: Work) -> Parts:
    """These, or the same samples on each rank in runs that end elsewhere.

    Under a budget of tokens there may be up to twice as many, where that pays what it costs to
    begin them. work: pays for it.
    """
    (R, M), m = parts.counts.shape, config.micro_batch_size
    if m is not None and (M == 1 or len(batch) == R * M * m):
        return parts
    ranks, begin, last = _Ranks.of(batch, parts, config), 0.0, M
    if not work.affords(tuning.RECUT.of(ranks.table.size, M, M)):
        return parts
    if m is None:
        begin = begin_cost(batch.x, batch.s, config.micro_batch_tokens or 1)
        last = max(min(tuning.TIMES_FEWEST * M, int(ranks.sizes.min())), M)
    counts = [count for count in range(M, last + 1) if count == config.micro_batches(count)]
    counts = counts[:: -(-len(counts) // tuning.RECUT_COUNTS)]
    cuts = ranks.cuts(counts) + [evenly(ranks.sizes, count) for count in counts]
    best = min(cuts, key=lambda cut: ranks.time(cut, config) + begin * cut.shape[1])
    if config.sync is Sync.MICRO_STEP and R > 1:
        best = ranks.beside_others(best, config, work)
    found = ranks.parts(batch, best)
    return min(
        (parts, found),
        key=lambda each: time_of(batch, each, config) + begin * each.num_micro_batches,
    )


@dataclass(frozen=True, slots=True)
class _Ranks:
    """What each rank has, in falling order.

    sequence: int64[n], samples rank by rank. sizes: int64[R], how many each has. table:
    float64[width, R, most of a rank], what a run of j + 1 samples costs that begins at a rank's
    i-th; inf where none may.
    """

    sequence: IntArray
    sizes: IntArray
    table: FloatArray

    @classmethod
    def of(cls, batch: Batch, parts: Parts, config: PlanConfig) -> "_Ranks":
        """Of micro-batches whose ranks are to stay as they are."""
        n, R, sizes = len(batch), len(parts.counts), parts.counts.sum(axis=1)
        rank_of = np.empty(n, dtype=np.int64)
        rank_of[parts.sequence] = np.repeat(np.arange(R), sizes)
        place = by_label(rank_of[batch.order], R)
        most = np.full(n, config.micro_batch_size or 1)
        if config.micro_batch_tokens is not None:
            most = most_in_run(batch.s, config.micro_batch_tokens)
        at = np.arange(int(sizes.max()))
        own = place[np.minimum((sizes.cumsum() - sizes)[:, None] + at, n - 1)]
        width = np.minimum(most[own], sizes[:, None] - at)
        length = np.arange(1, int(width.max()) + 1)[:, None, None]
        table = np.where(length <= width, length * batch.x[own], np.inf)
        return cls(batch.order[place], sizes, table)

    def cuts(self, counts: list[int], pace: FloatArray | None = None) -> list[IntArray]:
        """Samples of each run, int64[R, M], for each of these M; ranks have as many samples.

        With one M they may have fewer: then the first runs have one sample each. pace: float64[R,
        M], what others take in each micro-step; below that it hardly matters what a run costs.
        None: what counts is the sum.
        """
        (width, R, n), M = self.table.shape, counts[-1]
        rest = np.full((M, R, n + width + 1), np.inf)  # least from each item on with later runs
        rest[M - 1, np.arange(R), self.sizes] = 0.0
        for j in range(M - 1, 0, -1):
            total = self._paced(self.table, pace, j) + _shifted(rest[j], width, n)
            np.minimum.reduce(total, axis=0, out=rest[j - 1, :, :n])
            few = self.sizes <= j  # the later runs of some are empty
            rest[j - 1, few] = rest[j, few]
        return [self._walk(rest[M - count :], pace) for count in counts]

    def _paced(self, cost: FloatArray, pace: FloatArray | None, j: int) -> FloatArray:
        if pace is None:
            return cost
        beyond: FloatArray = np.maximum(cost, pace[:, j].reshape(-1, *[1] * (cost.ndim - 2)))
        beyond += tuning.RECUT_OWN * cost
        return beyond

    def _walk(self, rest: FloatArray, pace: FloatArray | None) -> IntArray:
        """From the first item of each rank to its last. rest: what is least from each item on."""
        (width, R, n), rows = self.table.shape, np.arange(self.table.shape[1])
        step, ends = np.arange(1, width + 1)[:, None], [np.zeros(R, dtype=np.int64)]
        for j, later in enumerate(rest):
            total = self._paced(self.table[:, rows, np.minimum(ends[-1], n - 1)], pace, j)
            total = total + later[rows, ends[-1] + step]
            ends.append(np.minimum(ends[-1] + 1 + total.argmin(axis=0), self.sizes))
        counts: IntArray = np.diff(ends, axis=0).T
        return counts

    def costs(self, counts: IntArray) -> FloatArray:
        """What runs of so many samples cost, falling in each rank, float64[R, M]."""
        first = np.minimum(counts.cumsum(axis=1) - counts, self.table.shape[2] - 1)
        rows, last = np.arange(len(counts))[:, None], np.minimum(counts, len(self.table)) - 1
        cost = np.where(counts > len(self.table), np.inf, self.table[last, rows, first])
        return -np.sort(-np.where(counts > 0, cost, 0.0), axis=1)

    def time(self, counts: IntArray, config: PlanConfig) -> float:
        """What these take."""
        return step_time(self.costs(counts), config.sync, config.pipeline_stages)

    def beside_others(self, counts: IntArray, config: PlanConfig, work: Work) -> IntArray:
        """These, or what comes of cuts beside what the other ranks take, as long as that helps.

        Where all cut anew two may evade each other and meet again, so every other one alone may.
        """
        odd, M = np.arange(len(counts))[:, None] % 2 == 1, counts.shape[1]
        for _ in range(tuning.RECUT_ROUNDS):
            if not work.affords(tuning.RECUT.of(self.table.size, M, M)):
                break
            cost = self.costs(counts)
            second, first = np.partition(cost, -2, axis=0)[-2:]
            [new] = self.cuts([M], np.where(cost == first, second, first))
            tries = (counts, new, np.where(odd, new, counts), np.where(odd, counts, new))
            times = [self.time(each, config) for each in tries]
            if not min(times) < times[0] * (1 - 1e-9):
                break
            counts = tries[int(np.argmin(times))]
        return counts

    def parts(self, batch: Batch, counts: IntArray) -> Parts:
        """The dearest run of each rank first, whatever is longest there."""
        own = np.append(batch.cost[self.sequence], 0.0)
        begin = (counts.ravel().cumsum() - counts.ravel()).reshape(counts.shape)
        turns = np.argsort(-own[begin] * counts, axis=1, kind="stable")
        begin, counts = (np.take_along_axis(each, turns, 1) for each in (begin, counts))
        sizes = counts.ravel()
        at = np.repeat(begin.ravel() - (sizes.cumsum() - sizes), sizes)
        return Parts(self.sequence[at + np.arange(len(batch))], counts)


def _shifted(rest: FloatArray, width: int, n: int) -> FloatArray:
    """The first n columns that are 1, 2, ... places further on, float64[width, rows, n]; a view."""
    by_row, by_column = rest.strides
    shape, strides = (width, len(rest), n), (by_column, by_row, by_column)
    return np.ndarray(shape, rest.dtype, rest, by_column, strides)
