"""Cutting each rank's samples, in their order, into micro-batches under a token budget.

Invariant: ranks keep their samples; a micro-batch holds at most `budget` tokens, or a single
sample that alone exceeds it. This is what trainers do without a plan: in order of arrival (next
fit), or each sample into the first micro-batch that has room (first fit).

Example, budget 10, tokens 6 5 4 3: next fit cuts 6 | 5 4 | 3, first fit packs 6 4 | 5 3.
"""

from collections.abc import Callable

import numpy as np

from rollout_planner.order import by_falling_tokens, running_sums
from rollout_planner.split.assign import lpt_budget
from rollout_planner.split.padded.levels import cut_padded, most_in_run
from rollout_planner.split.parts import Batch, Parts
from rollout_planner.types import FloatArray, IntArray, Layout, PlanConfig


def next_fit(s: IntArray, sizes: IntArray, budget: int) -> IntArray:
    """Samples of each run, int64[R, M] with zeros at the end, of tokens `s`, rank after rank.

    sizes: samples of each rank.
    """
    held, ends = running_sums(s), sizes.cumsum()
    at = ends - sizes
    return _all_ranks(lambda at: _stops(held, at, budget), at, ends)


def full_runs(most: IntArray, sizes: IntArray) -> IntArray:
    """The same of runs that hold so many samples if they begin with this one."""
    ends, last = np.cumsum(sizes), len(most) - 1
    return _all_ranks(lambda at: at + most[np.minimum(at, last)], ends - sizes, ends)


def _all_ranks(stops: Callable[[IntArray], IntArray], at: IntArray, ends: IntArray) -> IntArray:
    """Run after run, in all ranks at once. stops: where runs end that begin at these samples."""
    counts: list[IntArray] = []
    while not counts or np.count_nonzero(at < ends):
        to = np.minimum(stops(at), ends)
        counts.append(to - at)
        at = to
    return np.array(counts).T


def _stops(held: IntArray, at: IntArray, budget: int) -> IntArray:
    """Where runs end that begin at these samples. held: running sums of tokens."""
    fits: IntArray = held.searchsorted(held[at] + budget, "right") - 1
    return np.maximum(fits, at + 1)


def first_fit(ranks: list[IntArray], s: IntArray, budget: int) -> list[list[IntArray]]:
    """Pack each rank's items, in their order, into the first micro-batch that has room."""
    return [_first_fit(items, s[items].tolist(), budget) for items in ranks]


def spread(
    ranks: list[IntArray], x: FloatArray, s: IntArray, M: int, budget: int
) -> list[list[IntArray]]:
    """Each rank's items over M micro-batches that cost about the same, if these do.

    The largest goes first, wherever it stands; a micro-batch keeps the order that items come in.
    """
    out = []
    for items in ranks:
        falling = by_falling_tokens(s[items])
        found = lpt_budget(x[items[falling]], s[items[falling]], M, budget)
        if found is None:
            out.append(_first_fit(items, s[items].tolist(), budget))
        else:
            labels = np.empty_like(found)
            labels[falling] = found
            out.append([items[labels == b] for b in range(M)])
    return out


def _first_fit(items: IntArray, tokens: list[int], budget: int) -> list[IntArray]:
    rooms: list[int] = []
    bins: list[list[int]] = []
    for item, count in zip(items.tolist(), tokens, strict=True):
        b = next((b for b, room in enumerate(rooms) if count <= room), len(rooms))
        if b == len(rooms):
            rooms.append(budget)
            bins.append([])
        rooms[b] -= min(count, rooms[b])
        bins[b].append(item)
    return [np.array(members, dtype=np.int64) for members in bins]


def cut_ranks(ranks: list[IntArray], M: int, batch: Batch, config: PlanConfig) -> Parts:
    """Each rank's samples, in their order, in micro-batches as full as the limit allows.

    M: micro-batches of a rank, where these have a fixed size.
    """
    if config.micro_batch_size is None and config.layout is Layout.PACKED:
        return Parts.of_lists(_fitted(ranks, batch, config), config)
    sequence, sizes = np.concatenate(ranks), np.array([len(rank) for rank in ranks])
    if config.micro_batch_size is not None:
        return Parts.of_ranks(sequence, sizes, M, config.micro_batch_size)
    s, budget = batch.tokens[sequence], config.micro_batch_tokens or 1
    begins = np.zeros(len(s), dtype=bool)
    begins[np.cumsum(sizes)[:-1] % len(s)] = True
    if not ((s[1:] <= s[:-1]) | begins[1:]).all():
        return Parts.of_lists(cut_padded(ranks, batch.tokens, budget), config)
    counts = full_runs(most_in_run(s, budget), sizes)
    missing = config.micro_batches(counts.shape[1]) - counts.shape[1]
    return Parts(sequence, np.pad(counts, ((0, 0), (0, missing))))


def _fitted(ranks: list[IntArray], batch: Batch, config: PlanConfig) -> list[list[IntArray]]:
    """Each rank's samples, falling, by first fit, or evenly where there must be more than that."""
    budget = config.micro_batch_tokens or 1
    fitted = first_fit(ranks, batch.tokens, budget)
    needed = max(len(rank) for rank in fitted)
    M = config.micro_batches(needed)
    return fitted if needed == M else spread(ranks, batch.cost, batch.tokens, M, budget)
