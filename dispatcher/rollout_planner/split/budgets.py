"""Packing where ranks meet once a step: what counts is the most that a rank has in all.

Invariant: a micro-batch holds at most `budget` tokens, or a single item that alone exceeds it; all
ranks have the same number M of them, the smallest that is found.

Two ways, the better of which stays. Samples go to ranks by cost, largest first onto the least
loaded, and each rank packs its own; what finds no room there goes where there is some. Or bins, as
few as can be, go to ranks, M to each, so that their sums are close. Swaps between ranks, in and out
of micro-batches with room, level what is left.

Example, R = 2, budget 10, tokens 10 6 5 5 3 2 1, cost tokens squared: 32 tokens need M = 2. By
cost 10 2 | 6 5 5 3 1 are 104 and 96, and the second rank packs as 6 3 1 and 5 5.
"""

import numpy as np

from rollout_planner import tuning
from rollout_planner.split.assign import Labels, best_fit, lpt_budget, swap_level
from rollout_planner.split.packing import (
    bin_of_each,
    fill,
    members,
    too_many_slots,
)
from rollout_planner.split.partition import bins_onto_ranks
from rollout_planner.split.parts import fill_empty
from rollout_planner.types import Allowed, FloatArray, IntArray


def pack_ranks(
    x: FloatArray, s: IntArray, R: int, budget: int, allowed: Allowed = int
) -> tuple[Labels, int]:
    """Micro-batch of each item, numbered rank by rank, and M. Items descend in cost and in tokens.

    None is empty needlessly.
    """
    t = np.minimum(s, budget)
    bins, M = fill(x, s, R, budget, allowed)
    load = np.bincount(bins, weights=x, minlength=R * M).astype(np.float64)
    found = [_level(bins_onto_ranks(load, R, M)[bins], x, t, (R, M), budget)]
    by_samples = _by_samples(x, t, R, M, budget)
    if by_samples is not None:
        found.append(by_samples)
    labels = min(found, key=lambda each: float(np.bincount(each // M, weights=x).max()))
    counts = np.bincount(labels, minlength=R * M).reshape(R, M)
    if counts.min() == 0:
        sequence, counts = fill_empty(
            np.argsort(labels, kind="stable"), counts, x, halve=True, across=True
        )
        labels = np.empty_like(labels)
        labels[sequence] = np.repeat(np.arange(R * M), counts.ravel())
    return labels, M


def _by_samples(x: FloatArray, t: IntArray, R: int, M: int, budget: int) -> Labels | None:
    """Samples onto ranks, then each rank's into its micro-batches; None if some find no room."""
    rank = lpt_budget(x, t, R, M * budget)
    if rank is None or too_many_slots(rank, R):
        return None
    ids = members(rank, R)
    swap_level(ids[None], np.append(x, 0.0), np.append(t, 0), M * budget)
    labels = np.empty_like(rank)
    for r, held in enumerate(np.sort(ids, axis=1)):
        items = held[held < len(x)]
        own = lpt_budget(x[items], t[items], M, budget)
        if own is None:
            own = best_fit(t[items], np.full(M, budget), budget)
        labels[items] = np.where(own < 0, -1, own + r * M)
    if labels.min() < 0:
        if not _place_left(labels, x, t, (R, M), budget):
            return None
        labels = _level(labels, x, t, (R, M), budget)
    return labels


def _place_left(
    labels: Labels, x: FloatArray, t: IntArray, shape: tuple[int, int], budget: int
) -> bool:
    """Put items without label, in place, where there is room, on the least loaded rank."""
    (R, M), placed = shape, labels >= 0
    held = np.bincount(labels[placed], weights=t[placed], minlength=R * M)
    room = budget - held.astype(np.int64)
    load = np.bincount(labels[placed] // M, weights=x[placed], minlength=R)
    for i in np.flatnonzero(~placed).tolist():
        fits = np.flatnonzero(room >= t[i])
        if not len(fits):
            return False
        labels[i] = b = fits[load[fits // M].argmin()]
        room[b] -= t[i]
        load[b // M] += x[i]
    return True


def _level(
    labels: Labels, x: FloatArray, t: IntArray, shape: tuple[int, int], budget: int
) -> Labels:
    """After swaps between ranks; t: tokens, at most the budget. shape: R, M."""
    R, M = shape
    if too_many_slots(labels, R * M):
        return labels
    ids = members(labels, R * M)
    by_rank = ids.reshape(1, R, -1)
    costs, tokens = np.append(x, 0.0), np.append(t, 0)
    swap_level(by_rank, costs, tokens, budget, parts=M, rounds=tuning.RANK_ROUNDS)
    return bin_of_each(by_rank.reshape(ids.shape), len(labels))
