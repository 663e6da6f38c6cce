"""Micro-batches of a fixed number of samples, each padded to its longest."""

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.objective import micro_batches_for
from rollout_dispatcher.balance.split.padded.exchange import climbing, lacking_first
from rollout_dispatcher.balance.split.padded.runs import places_of
from rollout_dispatcher.balance.split.padded.shared import Items, shared_runs
from rollout_dispatcher.balance.split.padded.swaps import exchange_items
from rollout_dispatcher.balance.split.partition import padded_partition
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
    x, order = filled_up(batch, R * M * m)
    per_step, stages = config.sync is Sync.STEP, config.pipeline_stages
    full = Parts.of_slots(order[padded_partition(x, R, M, m, per_step, stages=stages)], n)
    if n == R * M * most:
        return full
    full = without_fillers(batch, full, config)
    lacking = R * M * most - n
    alike = not per_step and M > 1 and n > R * M and work.affords(climbing(R, M))
    found = [_lacking_first(batch, R, M, most)] if alike else []
    if not alike or lacking > tuning.NEARLY_FULL * n:
        found += _neighbours(batch, config, M, most, work)
    return min((full, *found), key=lambda parts: time_of(batch, parts, config))


def _lacking_first(batch: Batch, R: int, M: int, most: int) -> Parts:
    """Neighbours again, but what is lacking is so beside the longest, whoever shares a step."""
    x, n = batch.falling, len(batch)
    starts = lacking_first(n, R * M, most, R, x)
    places = places_of(np.diff(starts) * x[starts[:-1]], R, M, per_step=False)
    place = np.empty(n, dtype=np.int64)
    place[batch.dearest_first] = np.repeat(places, np.diff(starts))
    return _placed(place, R, M)


def split_padded_groups(batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
    """Groups of several lengths and sizes, under a budget of samples: neighbours if they fit.

    As few micro-batches come first, and for these what shares one may have to be far apart.
    """
    packed = split_by_tokens(batch, config, work)
    M, most = packed.num_micro_batches, config.micro_batch_tokens or 1
    found = [packed, *_neighbours(batch, config, M, most, work)]
    work = work.share(tuning.WORK_ON_ITEMS)
    found += [_exchanged(batch, parts, config, work) for parts in found]
    return min(found, key=lambda parts: time_of(batch, parts, config))


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
