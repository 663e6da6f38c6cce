"""The order of a step's micro-batches: what memory or a pipeline wants, at no price in waiting.

Invariant: each rank keeps its micro-batches, and nothing but their order changes. Where ranks wait
at every micro-step, a micro-step moves on all of them together, so that it takes what it took;
where they wait once a step, each rank has an order of its own.

An allocator that keeps the blocks it has been given asks for new ones whenever a micro-batch is
larger than all before it, and what it has may not fit: with the peak first it asks once. What
counts are tokens, as they are padded. A pipeline fills with its first micro-batches and drains with
its last, where most of its stages idle for as long as these take: it wants them small, in cost. A
micro-step counts as its largest on any rank. Fillers are smallest of all: last, or at the ends.

Example: of 4 9 7 2 8 the peak comes first in 9 8 7 4 2, and ends are small in 2 7 9 8 4.
"""

import numpy as np

from rollout_planner.split.parts import Batch, Parts, laid_out, matrix
from rollout_planner.types import FloatArray, IntArray, MicroBatchOrder, PlanConfig, Sync


def in_order(batch: Batch, parts: Parts, config: PlanConfig) -> Parts:
    """The same micro-batches in the order that the config asks for."""
    (R, M), order = parts.counts.shape, config.micro_batch_order
    if M == 1 or order is MicroBatchOrder.AS_PLANNED:
        return parts
    if order is MicroBatchOrder.PEAK_FIRST:
        size = tokens_of(batch, parts, config)
    else:
        size = matrix(batch, parts, config.layout)
    if config.sync is Sync.MICRO_STEP:
        size = size.max(axis=0, keepdims=True)
    if order is MicroBatchOrder.PEAK_FIRST and (size[:, 1:] <= size[:, :-1]).all():
        return parts
    turns: IntArray = np.argsort(-size, axis=1, kind="stable")
    if order is MicroBatchOrder.ENDS_SMALL:
        turns = np.concatenate((turns[:, ::2][:, ::-1], turns[:, 1::2]), axis=1)
    if (turns == np.arange(M)).all():
        return parts
    return rearranged(parts, np.arange(R)[:, None] * M + turns)


def tokens_of(batch: Batch, parts: Parts, config: PlanConfig) -> FloatArray:
    """Tokens of each micro-batch, as its layout pads them, float64[R, M]."""
    return laid_out(batch.tokens, parts, config.layout)


def rearranged(parts: Parts, source: IntArray) -> Parts:
    """`parts` with micro-batch number `source[r, j]`, counted rank by rank, as rank r's j-th."""
    begins = (parts.counts.cumsum() - parts.counts.ravel())[source.ravel()]
    counts = parts.counts.ravel()[source]
    sizes = counts.ravel()
    shift = np.repeat(begins - (sizes.cumsum() - sizes), sizes)
    return Parts(parts.sequence[np.arange(len(shift)) + shift], counts)
