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

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import by_label
from rollout_planner.split.padded import begin_of, most_in_run, price_of
from rollout_planner.split.parts import Batch, Parts, Work, by_falling_load, evenly, matrix
from rollout_planner.types import FloatArray, IntArray, PlanConfig, Sync, step_time


def recut(batch: Batch, parts: Parts, config: PlanConfig, work: Work) -> Parts:
    """These, or the same samples on each rank in runs that end elsewhere.

    Under a budget of tokens there may be up to twice as many, where that pays what it costs to
    begin them. work: pays for it.
    """
    (R, M), n, m, last, begin = parts.counts.shape, len(batch), config.micro_batch_size, 0, 0.0
    if m is not None and (M == 1 or n == R * M * m):
        return parts
    sizes, rank_of = parts.counts.sum(axis=1), parts.labels() // M
    place, most = by_label(rank_of[batch.order], R), np.full(n, m or 1)
    if m is None:
        most = most_in_run(batch.s, config.micro_batch_tokens or 1)
        begin = begin_of(batch, config)
        last = min(tuning.TIMES_FEWEST * M, int(sizes.min()))
    at = np.arange(int(sizes.max()))
    own = place[np.minimum((sizes.cumsum() - sizes)[:, None] + at, n - 1)]
    width = np.minimum(most[own], sizes[:, None] - at)
    length = np.arange(1, int(width.max()) + 1)[:, None, None]
    table = np.where(length <= width, length * batch.x[own], np.inf)
    price = tuning.ONCE * (1 + M / 2) + tuning.LOOK * table.size / 2

    def placed(counts: IntArray) -> Parts:
        """The dearest run of each rank first, whatever is longest there."""
        cut = Parts(batch.order[place], counts)
        return by_falling_load(cut, matrix(batch, cut, config.layout))

    def costs(counts: IntArray) -> FloatArray:
        return -np.sort(-matrix(batch, Parts(batch.order[place], counts), config.layout), axis=1)

    def time(counts: IntArray) -> float:
        stages, M = config.pipeline_stages, counts.shape[1]
        return float(step_time(costs(counts), config.sync, stages) + begin * M)

    if not work.affords(price):
        return parts
    rest = _rests(table, sizes, np.zeros((R, max(M, last))))
    allowed = [count for count in range(M, len(rest) + 1) if count == config.micro_batches(count)]
    allowed = allowed[:: -(-len(allowed) // tuning.RECUT_COUNTS)]
    tried = [_walked(table, sizes, rest[-count:], np.zeros((R, count))) for count in allowed]
    for even in [evenly(sizes, count) for count in allowed]:
        begins = np.minimum(even.cumsum(axis=1) - even, len(at) - 1)
        tried += [even] if (even <= np.take_along_axis(width, begins, 1)).all() else []
    best = min(tried, key=time)
    odd = np.arange(R)[:, None] % 2 == 1
    while config.sync is Sync.MICRO_STEP and R > 1 and work.affords(price):
        cost = costs(best)
        first, second = -np.sort(-cost, axis=0)[:2]
        pace = np.where(cost == first, second, first)
        new = _walked(table, sizes, _rests(table, sizes, pace), pace)
        found = min((np.where(who, new, best) for who in (odd | True, odd, ~odd)), key=time)
        if time(found) >= time(best) * (1 - tuning.ROUNDING):
            break
        best = found
    return min((parts, placed(best)), key=lambda each: price_of(batch, each, config))


def _beyond(cost: FloatArray, pace: FloatArray) -> FloatArray:
    """What runs cost beside what others take in that micro-step: below that it hardly matters."""
    beyond: FloatArray = np.maximum(cost, pace)
    beyond += tuning.LEVEL * cost
    return beyond


def _rests(table: FloatArray, sizes: IntArray, pace: FloatArray) -> FloatArray:
    """Least from each item of each rank on with the runs from the j-th, float64[M, R, items + ...].

    table: float64[width, R, most of a rank], what a run of j + 1 samples costs that begins at a
    rank's i-th; inf where none may. sizes: samples of each rank. pace: float64[R, M].
    """
    (width, R, n), M = table.shape, pace.shape[1]
    rest = np.full((M, R, n + width + 1), np.inf)
    rest[M - 1, np.arange(R), sizes] = 0.0
    for j in range(M - 1, 0, -1):
        later = np.lib.stride_tricks.sliding_window_view(rest[j], width, axis=1)[:, 1 : n + 1]
        total = _beyond(table, pace[:, j, None]) + later.transpose(2, 0, 1)
        np.minimum.reduce(total, axis=0, out=rest[j - 1, :, :n])
        few = sizes <= j  # the later runs of some are empty
        rest[j - 1, few] = rest[j, few]
    return rest


def _walked(table: FloatArray, sizes: IntArray, rest: FloatArray, pace: FloatArray) -> IntArray:
    """Samples of each run, int64[R, M], from the first item of each rank to its last."""
    (width, R, n), ends = table.shape, [np.zeros(len(sizes), dtype=np.int64)]
    rows, step = np.arange(R), np.arange(1, width + 1)[:, None]
    for j, later in enumerate(rest):
        total = _beyond(table[:, rows, np.minimum(ends[-1], n - 1)], pace[:, j])
        total = total + later[rows, ends[-1] + step]
        ends.append(np.minimum(ends[-1] + 1 + total.argmin(axis=0), sizes))
    counts: IntArray = np.diff(ends, axis=0).T
    return counts
