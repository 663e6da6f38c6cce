"""Splitting for ranks of different speed: work in proportion to it, as far as limits allow.

Invariant: each micro-batch keeps within its limits, each group its rank; the result never takes
longer than what was given.

What was split for ranks that are alike is dealt anew. Where ranks meet once a step, samples go to
ranks, the largest first, each to the rank that would be done with it first (Graham 1969; of
machines that differ in speed Gonzalez, Ibarra & Sahni 1977), which fills its micro-batches. Where
they meet at every micro-step, so do the samples of each micro-step. Swaps level what each has.
Example: of samples 4 4 2 2 a rank of slowness 2 gets a 4, and one of slowness 1 gets 4 2 2.

Where micro-batches hold so many samples each, a slow rank has as many as others, and smaller ones.
Example, one a micro-batch: of 9 8 6 5 4 3 ranks of slowness 1, 1 and 2 get 9 8 | 4 and 6 5 | 3.

Padded under a budget, neighbours share a micro-batch, and a slow rank's is shorter: all end once
they cost a share of what that micro-step did for ranks that are alike, over their slowness. The
smallest share that leaves no sample over is found by halving.

What does not gain by any of that changes places at least: the least work to the slowest.
"""

from bisect import bisect_left
from itertools import pairwise

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import by_label
from rollout_planner.split import assign
from rollout_planner.split.groups import Share, split_plainly
from rollout_planner.split.padded import most_in_run, price_of
from rollout_planner.split.parts import (
    Batch,
    Parts,
    matrix,
    rearranged,
    room_for,
    without_fillers,
)
from rollout_planner.types import FloatArray, IntArray, Layout, PlanConfig, Sync


def for_speeds(batch: Batch, parts: Parts, config: PlanConfig) -> Parts:
    """These, or what takes ranks of such slowness less time."""
    slowness = config.slowness
    assert slowness is not None, "there is nothing to do for ranks that are alike"

    def share(load: FloatArray, weight: IntArray, _ranks: int, cap: int) -> IntArray | None:
        ranks = assign.lpt_budget(load, weight, len(slowness), cap, slowness=slowness)
        return None if ranks is None else _levelled(ranks, load, weight, cap=cap, slowness=slowness)

    found, alone = [parts, _placed(batch, parts, config, share)], batch.group is None
    if config.sync is Sync.STEP or parts.num_micro_batches == 1 or not alone:
        found.append(without_fillers(batch, split_plainly(batch, config, share)))
    if alone and config.micro_batch_size is not None:
        found.append(without_fillers(batch, _by_scale(batch, parts, config, slowness)))
    elif alone and config.pads_to_budget:
        found.append(without_fillers(batch, _by_share(batch, parts, config, slowness)))
    packed = config.layout is Layout.PACKED or config.micro_batch_size == 1
    if config.sync is Sync.MICRO_STEP and packed and alone:
        found += [
            without_fillers(batch, _dealt(batch, each, config, slowness)) for each in found[1:]
        ]
    return min(found, key=lambda each: price_of(batch, each, config))


def _placed(batch: Batch, parts: Parts, config: PlanConfig, share: Share) -> Parts:
    """The same micro-batches, the least work for the slowest rank: in each micro-step by itself,
    or of all that there are.
    """
    (R, M), cost = parts.counts.shape, matrix(batch, parts, config.layout)
    if config.sync is Sync.STEP and batch.group is None:
        falling = np.argsort(-cost.ravel(), kind="stable")
        ranks = share(cost.ravel()[falling], np.ones(R * M, dtype=np.int64), R, M)
        assert ranks is not None, "each has room for as many as there are"
        return rearranged(parts, falling[by_label(ranks, R)].reshape(R, M))
    if batch.group is not None:
        cost = np.repeat(cost.sum(axis=1, keepdims=True), M, axis=1)
    slowest = np.argsort(-np.array(config.slowness), kind="stable")
    source = np.empty((R, M), dtype=np.int64)
    source[slowest] = np.argsort(cost, axis=0, kind="stable") * M + np.arange(M)
    return rearranged(parts, source)


def _by_scale(batch: Batch, parts: Parts, config: PlanConfig, slowness: tuple[float, ...]) -> Parts:
    """So many neighbours a micro-batch, each rank's from where samples cost what is right for it,
    beside the largest that are left.
    """
    (R, M), m, fastest = parts.counts.shape, config.micro_batch_size or 1, min(slowness)
    ids, below = batch.dearest_first.tolist(), (-batch.falling).tolist()
    taken = [list[int]() for _ in range(R * M)]
    by_speed = sorted(range(R), key=slowness.__getitem__)
    for j in range(M):
        level = below[0] * fastest if below else 0.0
        for r in by_speed:
            at = max(min(bisect_left(below, level / slowness[r]), len(below) - m), 0)
            taken[r * M + j] = ids[at : at + m]
            del ids[at : at + m], below[at : at + m]
    return Parts.of_lists(taken, R)


def _by_share(batch: Batch, parts: Parts, config: PlanConfig, slowness: tuple[float, ...]) -> Parts:
    """Padded runs of neighbours whose costs are as the ranks' speeds, of each micro-step."""
    R, M = parts.counts.shape
    cost, most = batch.x.tolist(), most_in_run(batch.s, config.micro_batch_tokens or 1).tolist()
    dearest = np.sort(matrix(batch, parts, config.layout).max(axis=0))[::-1]
    wanted = (dearest[:, None] / np.array(slowness)).ravel().tolist()

    def runs(share: float) -> list[int]:
        starts = [0]
        for level in wanted:
            at = starts[-1]
            if at < len(cost):
                length = int(min(share * level / cost[at], most[at])) if cost[at] else most[at]
                at += max(length, 1)
            starts.append(min(at, len(cost)))
        return starts

    low, high = 0.0, 2.0 * max(slowness)
    for _ in range(tuning.ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if runs(middle)[-1] == len(cost) else (middle, high)
    starts, order = runs(high), batch.order.tolist()
    if starts[-1] < len(cost):  # the budget leaves no choice
        return parts
    found = [order[start:end] for start, end in pairwise(starts)]
    return Parts.of_lists([found[j * R + r] for r in range(R) for j in range(M)], R)


def _dealt(batch: Batch, parts: Parts, config: PlanConfig, slowness: tuple[float, ...]) -> Parts:
    """The samples of each micro-step dealt to ranks anew where that gains, and levelled."""
    (R, M), order, x = parts.counts.shape, batch.dearest_first, batch.falling
    rank, step = np.divmod(parts.labels()[order], M)
    weight, cap = room_for(batch, config)
    weight = weight[order]
    dealt = assign.fill_sets(x, weight, step, R, cap, slowness=slowness)

    def times(ranks: IntArray) -> FloatArray:
        load = np.bincount(step * R + ranks, x, R * M).reshape(M, R)
        longest: FloatArray = (load * slowness).max(axis=1)
        return longest

    gains = times(np.maximum(dealt, 0)) < times(rank)
    gains &= np.bincount(step, dealt < 0, M) == 0
    rank = np.where(gains[step], dealt, rank)
    bins = _levelled(step * R + rank, x, weight, cap=cap, slowness=slowness, rows=M)
    return Parts.of_labels(order, bins % R * M + bins // R, M, R)


def _levelled(
    labels: IntArray,
    cost: FloatArray,
    weight: IntArray,
    *,
    cap: int,
    slowness: tuple[float, ...],
    rows: int = 1,
) -> IntArray:
    """Bin of each item after swaps between the ranks of each row, towards shares as their speeds.

    weight: what each takes of a bin's `cap`.
    """
    R, speed = len(slowness), 1 / np.array(slowness)
    level = np.bincount(labels // R, cost, rows) / speed.sum()
    base = level[:, None] * (1 - speed)
    return assign.levelled(labels, cost, rows * R, weight, cap, rows=rows, base=base)
