"""Splitting for ranks of different speed: work in proportion to it, as far as limits allow.

Invariant: each micro-batch keeps within its limits, each group its rank; the result never takes
longer than what was given.

What was split for ranks that are alike is dealt anew. Where ranks meet once a step, samples go to
ranks, the largest first, each to the rank that would be done with it first (Graham 1969; of
machines that differ in speed Gonzalez, Ibarra & Sahni 1977), which fills its micro-batches.
Where they meet at every micro-step, so do the samples of each micro-step. What does not gain by
that, as of padded micro-batches, changes places at least: the least work to the slowest.

Example: of samples 4 4 2 2 a rank of slowness 2 gets a 4, and one of slowness 1 gets 4 2 2.
"""

import numpy as np

from rollout_planner.split.assign import fill_sets, lpt_budget
from rollout_planner.split.groups import split_plainly
from rollout_planner.split.padded import price_of
from rollout_planner.split.parts import (
    Batch,
    Parts,
    matrix,
    rearranged,
    without_fillers,
)
from rollout_planner.types import FloatArray, IntArray, Layout, PlanConfig, Sync


def for_speeds(batch: Batch, parts: Parts, config: PlanConfig) -> Parts:
    """These, or what takes ranks of such slowness less time."""
    slowness = config.slowness
    assert slowness is not None, "there is nothing to do for ranks that are alike"

    def share(load: FloatArray, weight: IntArray, _ranks: int, cap: int) -> IntArray | None:
        return lpt_budget(load, weight, len(slowness), cap, slowness=slowness)

    found = [parts, _placed(batch, parts, config)]
    if config.sync is Sync.STEP or parts.num_micro_batches == 1 or batch.group is not None:
        found.append(without_fillers(batch, split_plainly(batch, config, share)))
    packed = config.layout is Layout.PACKED or config.micro_batch_size == 1
    if config.sync is Sync.MICRO_STEP and packed and batch.group is None:
        found.append(without_fillers(batch, _dealt(batch, found[1], config, slowness)))
    return min(found, key=lambda each: price_of(batch, each, config))


def _placed(batch: Batch, parts: Parts, config: PlanConfig) -> Parts:
    """The same micro-batches, the least work for the slowest rank, in each micro-step by itself."""
    (R, M), cost = parts.counts.shape, matrix(batch, parts, config.layout)
    if config.sync is Sync.STEP or batch.group is not None:
        cost = np.repeat(cost.sum(axis=1, keepdims=True), M, axis=1)
    slowest = np.argsort(-np.array(config.slowness), kind="stable")
    source = np.empty((R, M), dtype=np.int64)
    source[slowest] = np.argsort(cost, axis=0, kind="stable") * M + np.arange(M)
    return rearranged(parts, source)


def _dealt(batch: Batch, parts: Parts, config: PlanConfig, slowness: tuple[float, ...]) -> Parts:
    """The samples of each micro-step dealt to ranks anew, where that gains."""
    (R, M), m, order, x = (
        parts.counts.shape,
        config.micro_batch_size,
        batch.dearest_first,
        batch.falling,
    )
    rank, step = np.divmod(parts.labels()[order], M)
    weight = batch.tokens[order] if m is None else np.ones_like(order)
    cap = m or config.micro_batch_tokens or 1
    dealt = fill_sets(x, weight, step, R, cap, slowness=slowness)

    def times(ranks: IntArray) -> FloatArray:
        load = np.bincount(step * R + ranks, x, R * M).reshape(M, R)
        longest: FloatArray = (load * slowness).max(axis=1)
        return longest

    gains = times(np.maximum(dealt, 0)) < times(rank)
    gains &= np.bincount(step, dealt < 0, M) == 0
    rank = np.where(gains[step], dealt, rank)
    return Parts.of_labels(order, rank * M + step, M, R)
