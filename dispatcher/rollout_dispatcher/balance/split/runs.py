"""Cutting each rank's samples, in their order, into micro-batches under a token budget.

Invariant: ranks keep their samples; a micro-batch holds at most `budget` tokens, or a single
sample that alone exceeds it. This is what trainers do without a plan: in order of arrival (next
fit), or each sample into the first micro-batch that has room (first fit).

Example, budget 10, tokens 6 5 4 3: next fit cuts 6 | 5 4 | 3, first fit packs 6 4 | 5 3.
"""

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.order import by_falling_tokens, running_sums
from rollout_dispatcher.balance.split.budget_fit import lpt_budget
from rollout_dispatcher.balance.split.padded.runs import cut_padded
from rollout_dispatcher.balance.split.parts import Batch, Parts
from rollout_dispatcher.plan import FloatArray, IntArray, Layout, PlanConfig


def next_fit(s: IntArray, sizes: IntArray, budget: int) -> IntArray:
    """Samples of each run, int64[R, M] with zeros at the end, of tokens `s`, rank after rank.

    sizes: samples of each rank.
    """
    held, ends = running_sums(s), sizes.cumsum()
    at = ends - sizes
    if held[-1] > tuning.MANY_RUNS * len(sizes) * budget:
        stops = np.append(_stops(held, np.arange(len(s)), budget), len(s))
        return _rank_by_rank(stops.tolist(), at.tolist(), ends.tolist())
    counts: list[IntArray] = []
    while not counts or np.count_nonzero(at < ends):
        to = np.minimum(_stops(held, at, budget), ends)
        counts.append(to - at)
        at = to
    return np.array(counts).T


def _stops(held: IntArray, at: IntArray, budget: int) -> IntArray:
    """Where runs end that begin at these samples. held: running sums of tokens."""
    fits: IntArray = held.searchsorted(held[at] + budget, "right") - 1
    return np.maximum(fits, at + 1)


def _rank_by_rank(stops: list[int], starts: list[int], ends: list[int]) -> IntArray:
    """From run to run in each rank, instead of in all ranks at once."""
    ranks: list[list[int]] = []
    for start, end in zip(starts, ends, strict=True):
        at, counts = start, []
        while at < end:
            to = min(stops[at], end)
            counts.append(to - at)
            at = to
        ranks.append(counts)
    table = np.zeros((len(ranks), max(map(len, ranks))), dtype=np.int64)
    for r, counts in enumerate(ranks):
        table[r, : len(counts)] = counts
    return table


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
    if config.micro_batch_size is None:
        return Parts.of_lists(_fitted(ranks, batch, config), config)
    sizes = np.array([len(rank) for rank in ranks])
    return Parts.of_ranks(np.concatenate(ranks), sizes, M, config.micro_batch_size)


def _fitted(ranks: list[IntArray], batch: Batch, config: PlanConfig) -> list[list[IntArray]]:
    """Each rank's samples, falling, by first fit, or evenly where there must be more than that."""
    budget = config.micro_batch_tokens or 1
    if config.layout is Layout.PADDED:
        return cut_padded(ranks, batch.tokens, budget)
    fitted = first_fit(ranks, batch.tokens, budget)
    needed = max(len(rank) for rank in fitted)
    M = config.micro_batches(needed)
    return fitted if needed == M else spread(ranks, batch.cost, batch.tokens, M, budget)
