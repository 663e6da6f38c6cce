"""Padded micro-batches of ranks that keep their samples: where each of them ends.

Invariant: every rank keeps its samples; its micro-batches are runs of them in falling order, within
their limit (or a single sample), as many as asked for and none empty unless its samples are fewer.

Where whole groups stay on ranks, neighbours in length cannot go to any rank that suits them; but a
rank may end its runs early. As full as the limit allows, a run may hold many short samples beside
one long. Which ends are best is a program over a rank's samples: where ranks meet once a step its
runs cost the least in all, where they meet at every micro-step they exceed what the other ranks
have there by the least. Ranks take turns until none gains.

Example, up to 3 samples, costs 9 2 2 1 on a rank with two micro-batches: 9 2 2 | 1 costs 27 + 1,
and 9 | 2 2 1 takes 9 + 6.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.micro_batch_order import rearranged
from rollout_dispatcher.balance.split.padded.runs import most_in_run
from rollout_dispatcher.balance.split.parts import Batch, Parts, matrix, time_of
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import FloatArray, IntArray, PlanConfig, Sync


def recut(batch: Batch, parts: Parts, config: PlanConfig, work: Work) -> Parts:
    """The same ranks with runs that end elsewhere, if that takes less; else `parts`.

    work: pays for it, as far as it goes.
    """
    if len(batch) == parts.counts.size * (config.micro_batch_size or 0):
        return parts  # all are full, so runs end nowhere else
    ranks = _Ranks.of(batch, parts, config)
    if not ranks.paid_by(work, len(ranks.sizes)):
        return parts
    table = _costs(batch.x[ranks.places], ranks)
    pace = np.zeros(parts.counts.shape)
    counts, alone = _least(table, ranks.sizes, pace)
    found = [parts, Parts(ranks.sequence, counts)]
    if config.sync is Sync.MICRO_STEP:
        own = -np.sort(-matrix(batch, parts, config.layout), axis=1)
        work = work.share(tuning.WORK_ON_RECUTS)
        for cost in (alone, own):
            found += _in_turns(table, ranks, cost, work)
        found += [_dearest_first(batch, each, config) for each in found]
    return min(found, key=lambda each: time_of(batch, each, config))


def _dearest_first(batch: Batch, parts: Parts, config: PlanConfig) -> Parts:
    """Each rank's micro-batches by what they cost, which is not always by their longest."""
    (R, M), cost = parts.counts.shape, matrix(batch, parts, config.layout)
    return rearranged(parts, np.arange(R)[:, None] * M + np.argsort(-cost, axis=1, kind="stable"))


@dataclass(frozen=True, slots=True)
class _Ranks:
    """What each rank has, in falling order.

    sequence: int64[n], samples rank by rank. sizes: int64[R], how many each has. places: int64[R,
    most of a rank], where they are among all. width: int64[R, most of a rank], samples that a run
    may have which begins there; 0 beyond the last. M: runs of a rank.
    """

    sequence: IntArray
    sizes: IntArray
    places: IntArray
    width: IntArray
    M: int

    @classmethod
    def of(cls, batch: Batch, parts: Parts, config: PlanConfig) -> "_Ranks":
        """Of micro-batches whose ranks are to stay as they are."""
        sizes, M = parts.counts.sum(axis=1), parts.num_micro_batches
        rank_of = np.empty(len(batch), dtype=np.int64)
        rank_of[parts.sequence] = np.repeat(np.arange(len(sizes)), sizes)
        sequence = np.argsort(rank_of[batch.order], kind="stable")
        at = np.arange(int(sizes.max()))
        places = sequence[np.minimum((sizes.cumsum() - sizes)[:, None] + at, len(batch) - 1)]
        left = sizes[:, None] - at  # samples from here on; each other run takes one of them
        width = np.minimum(_most(batch.s[places], config), left)
        width = np.clip(width, 0, np.maximum(sizes - M + 1, 1)[:, None])
        return cls(batch.order[sequence], sizes, places, width, M)

    def paid_by(self, work: Work, ranks: int) -> bool:
        """Whether so many ranks can be cut once for what is left."""
        size = ranks * self.width.shape[1] * int(self.width.max())
        return work.affords(tuning.RECUT.of(size, self.M, self.M))


def _most(s: IntArray, config: PlanConfig) -> IntArray:
    """Samples that a run may have which begins with each of tokens `s`."""
    if config.micro_batch_tokens is None:
        return np.full(s.shape, config.micro_batch_size or 1)
    return most_in_run(s, config.micro_batch_tokens)


def _costs(x: FloatArray, ranks: _Ranks) -> FloatArray:
    """What a run of j + 1 samples costs that begins at i: float64[R, j, i]; inf where none may."""
    length = np.arange(1, int(ranks.width.max()) + 1)[:, None]
    cost: FloatArray = np.where(length <= ranks.width[:, None], length * x[:, None], np.inf)
    return cost


def _in_turns(table: FloatArray, ranks: _Ranks, cost: FloatArray, work: Work) -> Iterator[Parts]:
    """After each round, in which each rank cuts its samples anew, the dearest first.

    cost: float64[R, M], what micro-batches take before.
    """
    counts, cost, last = np.zeros(cost.shape, dtype=np.int64), cost.copy(), np.inf
    for _ in range(tuning.RECUT_ROUNDS if len(cost) > 1 else 0):
        for r in np.argsort(-cost.sum(axis=1), kind="stable").tolist():
            if not ranks.paid_by(work, 1):
                return
            pace = np.delete(cost, r, axis=0).max(axis=0)
            one = slice(r, r + 1)
            counts[one], cost[one] = _least(table[one], ranks.sizes[one], pace[None])
        yield Parts(ranks.sequence, counts.copy())
        time = float(cost.max(axis=0).sum())
        if not time < last * (1 - 1e-9):
            return
        last = time


def _least(table: FloatArray, sizes: IntArray, pace: FloatArray) -> tuple[IntArray, FloatArray]:
    """Samples of each run, int64[R, M], and its cost, float64[R, M], of some ranks.

    pace: float64[R, M], what others take in each micro-step; below that it hardly matters what a
    run costs.
    """
    (R, width, n), M = table.shape, pace.shape[1]
    counts, cost, rows = np.zeros((R, M), dtype=np.int64), np.zeros((R, M)), np.arange(R)
    after = np.minimum(np.arange(1, width + 1)[:, None] + np.arange(n), n)
    rest = np.full((R, n + 1), np.inf)
    rest[rows, sizes] = 0.0
    lengths = np.zeros((M, R, n), dtype=np.int64)
    own = tuning.RECUT_OWN * table
    for j in range(M - 1, -1, -1):
        total = np.maximum(table, pace[:, j, None, None]) + own + rest[:, after]
        lengths[j], least = total.argmin(axis=1) + 1, total.min(axis=1)
        has = sizes > j  # ranks of fewer samples have fillers from there on
        rest[has, :n], rest[has, n] = least[has], np.inf
    at = np.zeros(R, dtype=np.int64)
    for j in range(M):
        has = at < sizes
        begin = np.minimum(at, n - 1)
        taken = lengths[j][rows, begin]
        counts[:, j] = np.where(has, taken, 0)
        cost[:, j] = np.where(has, table[rows, taken - 1, begin], 0.0)
        at += counts[:, j]
    return counts, cost
