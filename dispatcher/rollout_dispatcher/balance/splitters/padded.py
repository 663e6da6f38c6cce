"""Micro-batches of a fixed number of samples, each padded to its longest."""

from collections.abc import Iterator

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.objective import micro_batches_for
from rollout_dispatcher.balance.split.assign import lpt_budget
from rollout_dispatcher.balance.split.padded.exchange import climbed, climbing, lacking_first
from rollout_dispatcher.balance.split.padded.runs import places_of
from rollout_dispatcher.balance.split.padded.shared import Items, first_fit_items, shared_runs
from rollout_dispatcher.balance.split.padded.swaps import exchange_items
from rollout_dispatcher.balance.split.partition import bins_onto_ranks, padded_partition
from rollout_dispatcher.balance.split.parts import (
    Batch,
    Padded,
    Parts,
    matrix,
    time_of,
    without_fillers,
)
from rollout_dispatcher.balance.splitters.by_count import filled_up
from rollout_dispatcher.balance.splitters.by_tokens import split_by_tokens
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import IntArray, PlanConfig, Sync


def split_padded(batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
    """Sorted runs, which pad least; where samples are too few to fill them, of like cost."""
    R, most, n = config.dp_size, config.micro_batch_size or 1, len(batch)
    M, m = micro_batches_for(n, config), most
    if R * M * m > 2 * n:
        m = -(-n // (R * M))  # slots to fill; neighbours may still be more
    per_step, full = config.sync is Sync.STEP, n == R * M * most
    found, climbs = [], False
    if full or not per_step or n <= R * M:
        found.append(_full(batch, config, M, m))
    if n > R * M and not full:
        counts = lacking_first(n, R * M, most)
        climbs = not per_step and M > 1 and work.affords(climbing(R, M))
        if climbs:
            counts = np.diff(climbed(counts, batch.falling, np.full(n, most), R))
        found.append(_of_counts(batch, counts, config, M))
    if not full and (not climbs or R * M * most - n > tuning.NEARLY_FULL * n):
        found += _neighbours(batch, config, M, most, work)
    return min(found, key=lambda parts: time_of(batch, parts, config))


def _full(batch: Batch, config: PlanConfig, M: int, m: int) -> Parts:
    """Runs of m neighbours, but for the last."""
    R, per_step, stages = config.dp_size, config.sync is Sync.STEP, config.pipeline_stages
    x, order = filled_up(batch, R * M * m)
    slots = padded_partition(x, R, M, m, per_step, stages=stages)
    return without_fillers(batch, Parts.of_slots(order[slots], len(batch)), config)


def _of_counts(batch: Batch, counts: IntArray, config: PlanConfig, M: int) -> Parts:
    """Neighbours, so many in each run; these go where they suit the others."""
    R, stages = config.dp_size, config.pipeline_stages
    load = counts * batch.falling[counts.cumsum() - counts]
    if config.sync is Sync.STEP:
        places = bins_onto_ranks(load, R, M, stages)
    else:
        places = places_of(load, R, M, per_step=False)
    place = np.empty(len(batch), dtype=np.int64)
    place[batch.dearest_first] = np.repeat(places, counts)
    return _placed(place, R, M)


def split_padded_groups(batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
    """Groups of several lengths and sizes, under a budget of samples: neighbours if they fit.

    As few micro-batches come first, and for these what shares one may have to be far apart.
    """
    packed = split_by_tokens(batch, config, work)
    M, most = packed.num_micro_batches, config.micro_batch_tokens or 1

    def time(parts: Parts) -> float:
        return time_of(batch, parts, config)

    starts = [packed, *_neighbours(batch, config, M, most, work)]
    enough = tuning.WORTH_SWAPS * min(map(time, starts))
    fits = list(_fits(batch, config, M))
    starts += sorted((each for each in fits if time(each) < enough), key=time)[:1]
    work = work.share(tuning.WORK_ON_ITEMS)
    found = (_exchanged(batch, each, config, work) for each in starts)
    return min((*fits, *starts, *found), key=time)


def _fits(batch: Batch, config: PlanConfig, M: int) -> Iterator[Parts]:
    """First fits by falling length, by falling cost, and as they came; and LPT."""
    assert batch.padded is not None, "samples need no fits: neighbours waste least"
    longest, size, R = batch.padded.longest, batch.padded.size, config.dp_size
    most, per_step = config.micro_batch_tokens or 1, config.sync is Sync.STEP

    def first(order: IntArray) -> tuple[IntArray, IntArray | None]:
        return order, first_fit_items(size[order], R * M, most)

    dearest = batch.dearest_first
    lpt = dearest, lpt_budget(batch.falling, size[dearest], R * M, most)
    by_length = np.argsort(-longest, kind="stable")
    for order, found in (first(by_length), first(dearest), first(np.arange(len(size))), lpt):
        if found is not None:
            place = np.empty_like(found)
            place[order] = found
            load = matrix(batch, _placed(place, R, M), config.layout).ravel()
            yield _placed(places_of(load, R, M, per_step)[place], R, M)


def _exchanged(batch: Batch, parts: Parts, config: PlanConfig, work: Work) -> Parts:
    """After swaps of whole groups, in micro-steps and ranks that suit what they then cost."""
    assert batch.padded is not None, "samples need no swaps: neighbours waste least"
    longest, size = batch.padded.longest, batch.padded.size
    (R, M), per_step = parts.counts.shape, config.sync is Sync.STEP
    place = np.empty(len(batch), dtype=np.int64)
    place[parts.sequence] = np.repeat(np.arange(R * M), parts.counts.ravel())
    items = Items(longest, size, config.micro_batch_tokens or 1)
    place = exchange_items(place, items, (R, M), work, per_step=per_step)
    moved = _placed(place, R, M)
    if per_step:
        return moved
    return _placed(places_of(matrix(batch, moved, config.layout).ravel(), R, M, False)[place], R, M)


def _placed(place: IntArray, R: int, M: int) -> Parts:
    counts = np.bincount(place, minlength=R * M).reshape(R, M)
    return Parts(np.argsort(place, kind="stable"), counts)


def _neighbours(batch: Batch, config: PlanConfig, M: int, most: int, work: Work) -> list[Parts]:
    """Runs of neighbours in length of so many samples at most, by each way; none if none fits.

    work: pays for them, and leaves what comparing them takes.
    """
    n, R = len(batch), config.dp_size
    if not work.affords(tuning.NEIGHBOURS.of(n, R, M), tuning.KK_BY_COUNT.of(n, R, M)):
        return []
    padded = batch.padded or Padded(batch.cost, np.ones(n, dtype=np.int64))
    order = np.argsort(-padded.longest, kind="stable")
    items, found = Items(padded.longest[order], padded.size[order], most), []
    per_step = config.sync is Sync.STEP or R == 1  # one rank waits for nobody
    for place in shared_runs(items, R, M, per_step=per_step):
        counts = np.bincount(place, minlength=R * M).reshape(R, M)
        found.append(Parts(order[np.argsort(place, kind="stable")], counts))
    return found
