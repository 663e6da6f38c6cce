"""What a set of samples will take on R ranks, without splitting it: bound and estimate.

Invariant: `lower_bound` never exceeds the time of a legal split; `estimate` may, but ranks
selections as the real split would, at a small part of its price.

Lower bounds: the time that no split of these samples over these ranks can beat.

Invariant: a bound never exceeds the time of any legal split. `x` is always cost in descending
order; the bounds are the mean rank, the largest sample with the smallest company it can have,
the pigeonholes (of k * R + 1 samples k + 1 share a rank), the crowd (of the k largest each has a
rank to itself, and then they share the smallest company there is, or two of them share one), and,
where micro-batches have a fixed size, the sorted columns: the j-th most expensive micro-step
holds at most R*m samples, so it costs at least what the (j*R*m)-th largest sample costs.

Dell'Amico & Martello 1995 discuss the first three of them. Example: x = [9, 3, 2, 2], R = 2, two
samples a rank: mean 8, largest with smallest company 9 + 2 = 11, pair 3 + 2 = 5; bound 11.
"""

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import running_sums
from rollout_planner.split.packing import fewest_micro_batches, well_filled
from rollout_planner.split.padded import padded_time
from rollout_planner.split.parts import Batch
from rollout_planner.types import FloatArray, IntArray, Layout, PlanConfig, Sync, bubble


def micro_batches_for(n: int, config: PlanConfig) -> int:
    """Micro-batches a rank that n samples need at a fixed micro-batch size."""
    per_step = config.dp_size * (config.micro_batch_size or 1)
    return config.micro_batches(max(-(-n // per_step), 1))


def bound_of(batch: Batch, M: int, config: PlanConfig) -> float:
    """The same of a batch; no rank has less than the dearest group that stays on one."""
    if config.slowness is not None:
        alone = float(batch.falling[:1].sum()) * min(config.slowness)
        return max(float(batch.cost.sum()) / config.capacity, alone)
    bound = lower_bound(batch.falling, M, config)
    if batch.group is None:
        return bound
    load = np.bincount(batch.group, weights=batch.cost).astype(np.float64)
    return max(bound, rank_bound(-np.sort(-load), config.dp_size))


def lower_bound(x: FloatArray, M: int, config: PlanConfig) -> float:
    """Time that no split of samples of cost `x` (descending) into M micro-batches can beat."""
    bound = _sum_bound(x, M, config)
    return bound if config.pipeline_stages == 1 else _pipeline_time(bound, x, M, config)


def _pipeline_time(time: float, x: FloatArray, M: int, config: PlanConfig) -> float:
    """What pipelines take at least where one stage, which never fills nor drains, takes `time`.

    The rank with the largest sample has less besides: as little as it can, or as much as makes it
    and the others finish together.
    """
    R, further, even = config.dp_size, config.pipeline_stages - 1, bubble(config.pipeline_stages, M)
    m, largest, work = config.micro_batch_size or 1, float(x[:1].sum()), float(x.sum())
    share = largest
    if m > 1 and len(x) == R * M * m:  # all are full, so it has company
        if config.layout is Layout.PADDED:
            largest, work = m * largest, m * float(x[::m].sum())
            share = largest
        else:
            largest, share = largest + float(x[1 - m :].sum()), share + float(x[1 - M * m :].sum())
    if config.sync is Sync.MICRO_STEP:
        return max(time * even, time + further * largest)
    together = (work * even - (R - 1) * further * largest) / (R - 1 + even)
    return max(time * even, max(share, together) + further * largest)


def _sum_bound(x: FloatArray, M: int, config: PlanConfig) -> float:
    R, m = config.dp_size, config.micro_batch_size
    if m is None:
        return rank_bound(x, R)
    full = len(x) == R * M * m
    if config.layout is Layout.PADDED and full:
        x = m * x[::m]  # sorted runs pad least
        m = 1
    if config.sync is Sync.MICRO_STEP and M > 1:
        return column_bound(x, R, m)
    return rank_bound(x, R, M * m)


def estimate(x: FloatArray, s: IntArray, config: PlanConfig) -> float:
    """Time that a good split of samples of cost `x` and tokens `s` (descending) takes.

    Of a pipeline's, without what it takes to fill and drain where all micro-batches are alike.
    """
    if not len(x):
        return 0.0
    stages, budget = config.pipeline_stages, config.micro_batch_tokens
    if budget is None:
        M = micro_batches_for(len(x), config)
    else:
        M = config.micro_batches(fewest_micro_batches(s, config.dp_size, budget))
    time = _stage_time(x, s, M, config)
    return time if stages == 1 else _pipeline_time(time, x, M, config) / bubble(stages, M)


def _stage_time(x: FloatArray, s: IntArray, M: int, config: PlanConfig) -> float:
    R, m = config.dp_size, config.micro_batch_size
    if m is None:
        budget = config.micro_batch_tokens or 1
        if config.layout is Layout.PADDED:
            return padded_time(x, s, config)
        if s.item(0) > budget:  # such a sample fills a bin, no more
            s = np.minimum(s, budget)
        if config.sync is Sync.STEP:  # a rank's micro-batches are one
            M, budget = 1, M * budget
        return max(packed_time(x, s, R, M, budget), pigeonhole_bound(x, R))
    if config.sync is Sync.STEP or m == 1 or config.layout is Layout.PADDED:
        return _sum_bound(x, M, config)
    if len(x) < R * M * m:
        return column_bound(x, R, m)
    return _row_time(x.reshape(M, m, R))


def packed_time(x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> float:
    """Sum over M micro-steps of their level, as if all but the largest items could be cut.

    A micro-step costs a rank its share of what is left or the largest item left. In the latter
    case it is filled up from the dear end, as far as the token budget goes, and its level rises
    if it leaves more tokens than the later micro-steps can well hold.
    """
    cost, held, n = running_sums(x), running_sums(s), len(x)
    all_cost, all_tokens = cost.item(n), held.item(n)
    fill = well_filled(all_tokens, R * M * budget)
    cheapest = x.item(n - 1) / max(s.item(n - 1), 1)
    time, first = 0.0, 0
    light = 0.0  # tokens that earlier micro-steps took from the light end, at the cheapest price
    for column in range(M):
        tokens = all_tokens - held.item(first) - light
        left = all_cost - cost.item(first) - light * cheapest
        if left <= 0 or tokens <= 0:
            break
        share, level = left / (R * (M - column)), x.item(first)
        last = column == M - 1
        if level <= share and not last:
            return time + share * (M - column)
        seeds = slice(first, min(first + R, n))
        rest = max(tokens - float(np.add.reduce(s[seeds])), 1.0)
        price = max((left - float(np.add.reduce(x[seeds]))) / rest, 0.0) or left / tokens
        if last:
            level = max(share, level)
            return time + _level_with_room(x[seeds], s[seeds], level, (tokens, price), budget)
        room = np.minimum(budget, s[seeds] + (level - x[seeds]) / price)
        by_tokens = held.searchsorted(held.item(first) + np.add.reduce(room), "right")
        by_cost = cost.searchsorted(cost.item(first) + R * level, "right")
        first = max(int(min(by_tokens, by_cost)) - 1, first + 1)
        lack = all_tokens - held.item(first) - light - fill * R * (M - column - 1) * budget
        if lack > 0:
            light += lack
            level += lack * cheapest / max(int(np.count_nonzero(room < budget)), 1)
        time += level
    return time


def _level_with_room(
    x: FloatArray, s: IntArray, level: float, needed: tuple[float, float], budget: int
) -> float:
    """Raise a level until bins that start with one of these items each have room for all tokens.

    needed: the tokens, and the price of each: below its level a bin takes them, up to the budget.
    """
    tokens, price = needed
    for _ in range(tuning.RISES):
        room = np.minimum(budget, s + (level - x) / price)
        lack = tokens - float(np.add.reduce(room))
        if lack <= 0:
            break
        open_bins = int(np.count_nonzero(room < budget))
        if not open_bins:
            break
        level += lack / open_bins * price
    return level


def _row_time(rows: FloatArray) -> float:
    """Micro-steps of m rows of R neighbours, each row largest onto least loaded."""
    loads = np.zeros((rows.shape[0], rows.shape[2]))
    for t in range(rows.shape[1]):
        loads.sort(axis=1)
        loads += rows[:, t]
    return float(loads.max(axis=1).sum())


def rank_bound(x: FloatArray, R: int, p: int | None = None) -> float:
    """Bound on the largest rank's sum; `p` is the exact count a rank where it is fixed."""
    if not len(x):
        return 0.0
    bound = max(float(np.add.reduce(x)) / R, x.item(0))
    if len(x) > R:
        bound = max(bound, pigeonhole_bound(x, R))
    if p is not None and len(x) == R * p:
        bound = max(bound, float(x[0] + x[len(x) - p + 1 :].sum()))
        if p > 1 and R > 1:
            bound = max(bound, _crowd(x, R, p))
    return bound


def pigeonhole_bound(x: FloatArray, R: int) -> float:
    """Of the k * R + 1 largest some rank has k + 1, which sum up to the smallest of them at least.

    Example: of 193 items of 10 and some of 1 on 64 ranks one has four of 10.
    """
    sums, k = running_sums(x), np.arange(1, (len(x) - 1) // R + 1)
    last = k * R + 1
    return float(np.maximum.reduce(sums[last] - sums[last - k - 1], initial=0.0))


def _crowd(x: FloatArray, R: int, p: int) -> float:
    """The k largest apart, with the k*(p-1) smallest on the k ranks, or two of them together."""
    k = np.arange(2, R + 1)
    sums = running_sums(x)
    apart = (sums[k] + sums[-1] - sums[len(x) - k * (p - 1)]) / k
    together = x[k - 2] + x[k - 1] + sums[-1] - sums[len(x) - p + 2]
    return float(np.minimum(apart, together).max())


def column_bound(x: FloatArray, R: int, m: int) -> float:
    """Bound on the sum over micro-steps of the largest micro-batch, m samples in each at most."""
    return max(float(np.add.reduce(x[:: R * m])), rank_bound(x, R))
