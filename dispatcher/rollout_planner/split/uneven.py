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
from heapq import heappop, heappush, heapreplace
from itertools import pairwise

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import by_label
from rollout_planner.split import assign
from rollout_planner.split.groups import Share, split_plainly
from rollout_planner.split.padded import begin_of, most_in_run
from rollout_planner.split.parts import (
    Batch,
    Parts,
    matrix,
    rearranged,
    time_of,
    without_fillers,
)
from rollout_planner.types import FloatArray, IntArray, Layout, PlanConfig, Sync


def for_speeds(batch: Batch, parts: Parts, config: PlanConfig) -> Parts:
    """These, or what takes ranks of such slowness less time."""
    slowness = config.slowness
    assert slowness is not None, "there is nothing to do for ranks that are alike"

    def share(load: FloatArray, weight: IntArray, _ranks: int, cap: int) -> IntArray | None:
        ranks = first_done(load, weight, slowness, cap)
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
    begin = begin_of(batch, config)
    return min(
        found, key=lambda each: time_of(batch, each, config) + begin * each.num_micro_batches
    )


def first_done(
    load: FloatArray, weight: IntArray, slowness: tuple[float, ...], cap: int
) -> IntArray | None:
    """Rank of each item of falling load: the one that would be done first of those with room.

    weight: what each takes of a rank's `cap`; one above it has a rank to itself. None: no room.
    Ranks that are equally fast have a heap together, by what they have, and of each heap only the
    least loaded is asked.
    """
    heaps: dict[float, list[tuple[float, int]]] = {}
    for rank, slow in enumerate(slowness):
        heaps.setdefault(slow, []).append((0.0, rank))
    room, full, ranks = [cap] * len(slowness), list[tuple[int, float, tuple[float, int]]](), []
    for cost, taken in zip(load.tolist(), weight.tolist(), strict=True):
        needed = min(taken, cap)
        while full and -full[0][0] >= needed:
            _, slow, entry = heappop(full)
            heappush(heaps[slow], entry)
        best, soonest = None, np.inf
        for slow, heap in heaps.items():
            while heap and room[heap[0][1]] < needed:
                heappush(full, (-room[heap[0][1]], slow, heappop(heap)))
            if heap and (heap[0][0] + cost) * slow < soonest:
                best, soonest = heap, (heap[0][0] + cost) * slow
        if best is None:
            return None
        loaded, rank = best[0]
        room[rank] -= needed
        heapreplace(best, (loaded + cost, rank))
        ranks.append(rank)
    return np.array(ranks, dtype=np.int64)


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
    return _parts_of(taken, R)


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
    return _parts_of([found[j * R + r] for r in range(R) for j in range(M)], R)


def _parts_of(found: list[list[int]], R: int) -> Parts:
    """From the samples of each micro-batch, rank by rank."""
    counts = np.array([len(each) for each in found], dtype=np.int64).reshape(R, -1)
    return Parts(np.array([i for each in found for i in each], dtype=np.int64), counts)


def _dealt(batch: Batch, parts: Parts, config: PlanConfig, slowness: tuple[float, ...]) -> Parts:
    """The samples of each micro-step dealt to ranks anew where that gains, and levelled."""
    (R, M), counts, m = parts.counts.shape, parts.counts.ravel(), config.micro_batch_size
    labels = np.empty(len(batch), dtype=np.int64)  # micro-step by micro-step
    labels[parts.sequence] = np.repeat(np.arange(R * M).reshape(M, R).T.ravel(), counts)
    weight = batch.tokens if m is None else np.ones(len(batch), dtype=np.int64)
    cap, slow = m or config.micro_batch_tokens or 1, np.array(slowness)
    order = batch.dearest_first[np.argsort(labels[batch.dearest_first] // R, kind="stable")]
    ends = np.searchsorted(labels[order] // R, np.arange(M + 1)).tolist()
    for j, (start, end) in enumerate(pairwise(ends)):
        own = order[start:end]
        ranks = first_done(batch.cost[own], weight[own], slowness, cap)
        if ranks is None:
            continue
        before = np.bincount(labels[own] % R, weights=batch.cost[own], minlength=R) * slow
        after = np.bincount(ranks, weights=batch.cost[own], minlength=R) * slow
        if after.max() < before.max():
            labels[own] = ranks + j * R
    labels = _levelled(labels, batch.cost, weight, cap=cap, slowness=slowness, rows=M)
    labels = labels % R * M + labels // R
    return Parts.of_labels(batch.order, labels[batch.order], M, R)


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
    R, slow = len(slowness), np.array(slowness)
    if assign.too_many_slots(labels, rows * R):
        return labels
    ids, x = assign.members(labels, rows * R).reshape(rows, R, -1), np.append(cost, 0.0)
    level = x[ids].sum(axis=(1, 2)) / (1 / slow).sum()
    base = level[:, None] * (1 - 1 / slow)
    assign.swap_level(ids, x, np.append(weight, 0), cap, base=base)
    return assign.bin_of_each(ids.reshape(rows * R, -1), len(labels))
