"""Splitting when a group has to stay on one DP rank: groups onto ranks, then micro-batches.

Invariant: all samples of a group are on the same rank; with a fixed micro-batch size no rank gets
more than M*m samples, where M grows until whole groups fit.

Groups go to ranks by falling cost, each to the least loaded rank with room (LPT), or in turn for
round-robin. If sizes leave a group without room, they go by falling size, and then M grows.
Example: R = 2, M*m = 4, groups of 3, 3, 2: the third fits nowhere, so M*m has to be 5 or more.
"""

import numpy as np

from rollout_dispatcher.balance.objective import micro_batches_for
from rollout_dispatcher.balance.split.padded.runs import cut_padded
from rollout_dispatcher.balance.split.parts import Batch, Parts
from rollout_dispatcher.balance.split.runs import first_fit, spread
from rollout_dispatcher.plan import FloatArray, IntArray, Layout, PlanConfig


def ranks_of_groups(
    batch: Batch, group: IntArray, config: PlanConfig, *, in_turn: bool = False
) -> tuple[list[IntArray], int]:
    """Samples of each rank, and M for a fixed micro-batch size (1 for a token budget).

    group: dense group number of each sample. Ranks keep the order of falling cost, or, where
    groups go to them in turn, that of arrival.
    """
    cost = batch.cost
    size = np.bincount(group)
    load = np.bincount(group, weights=cost).astype(np.float64)
    M = micro_batches_for(len(cost), config) if config.micro_batch_size else 1
    while True:
        cap = M * config.micro_batch_size if config.micro_batch_size else len(cost)
        rank_of = _assign(load, size, config.dp_size, cap, in_turn)
        if rank_of is not None:
            break
        M += config.micro_batch_multiple
    sequence = np.arange(len(cost)) if in_turn else batch.order
    ranks = rank_of[group[sequence]]
    return [sequence[ranks == r] for r in range(config.dp_size)], M


def _assign(load: FloatArray, size: IntArray, R: int, cap: int, in_turn: bool) -> IntArray | None:
    if in_turn:
        found = _in_turn(size, R, cap)
    else:
        found = _least_loaded(np.argsort(-load, kind="stable"), load, size, R, cap)
    if found is None:
        found = _least_loaded(np.lexsort((-load, -size)), load, size, R, cap)
    return found


def _in_turn(size: IntArray, R: int, cap: int) -> IntArray | None:
    room = [cap] * R
    rank_of = np.empty(len(size), dtype=np.int64)
    for g, count in enumerate(size.tolist()):
        turn = next((r % R for r in range(g, g + R) if room[r % R] >= count), None)
        if turn is None:
            return None
        room[turn] -= count
        rank_of[g] = turn
    return rank_of


def _least_loaded(
    sequence: IntArray, load: FloatArray, size: IntArray, R: int, cap: int
) -> IntArray | None:
    room, held = np.full(R, cap), np.zeros(R)
    rank_of = np.empty(len(size), dtype=np.int64)
    for g in sequence.tolist():
        open_held = np.where(room >= size[g], held, np.inf)
        r = int(np.argmin(open_held))
        if not np.isfinite(open_held[r]):
            return None
        room[r] -= size[g]
        held[r] += load[g]
        rank_of[g] = r
    return rank_of


def cut_ranks(ranks: list[IntArray], M: int, batch: Batch, config: PlanConfig) -> Parts:
    """Each rank's samples, in their order, in micro-batches as full as the limit allows."""
    if config.micro_batch_size is None:
        fitted = _fitted(ranks, batch, config)
    else:
        fitted = cut(ranks, M, config.micro_batch_size)
    return Parts.of_lists(fitted, config)


def _fitted(ranks: list[IntArray], batch: Batch, config: PlanConfig) -> list[list[IntArray]]:
    """Each rank's samples, falling, by first fit, or evenly where there must be more than that."""
    budget = config.micro_batch_tokens or 1
    if config.layout is Layout.PADDED:
        return cut_padded(ranks, batch.tokens, budget)
    fitted = first_fit(ranks, batch.tokens, budget)
    needed = max(len(rank) for rank in fitted)
    M = config.micro_batches(needed)
    return fitted if needed == M else spread(ranks, batch.cost, batch.tokens, M, budget)


def cut(ranks: list[IntArray], M: int, m: int) -> list[list[IntArray]]:
    """Runs of at most m in each rank's order; M micro-batches, empty ones at the end."""
    return [[rank[j * m : (j + 1) * m] for j in range(M)] for rank in ranks]


def deal(ranks: list[IntArray], M: int) -> list[list[IntArray]]:
    """Each rank's samples dealt in turn over its M micro-batches, so that these are alike."""
    return [[rank[j::M] for j in range(M)] for rank in ranks]
