"""Padded micro-batches: of a number of samples at most, or under a budget of padded tokens."""

import numpy as np

from rollout_planner import tuning
from rollout_planner.objective import micro_batches_for
from rollout_planner.split.micro_batch_order import rearranged
from rollout_planner.split.padded.fill import padded_runs
from rollout_planner.split.padded.levels import Counts, Items
from rollout_planner.split.padded.runs import (
    begin_cost,
    fewest_runs,
    most_in_run,
    places_of,
)
from rollout_planner.split.parts import Batch, Parts, matrix, time_of
from rollout_planner.splitters.by_tokens import split_by_tokens
from rollout_planner.types import IntArray, PlanConfig, Sync
from rollout_planner.work import Work


def split_padded(batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
    """Sorted runs, which pad least, of like cost in each micro-step."""
    n, R, budget = len(batch), config.dp_size, config.micro_batch_tokens
    if budget is None:
        order, longest, M = batch.dearest_first, batch.falling, micro_batches_for(n, config)
        most, counts = np.full(n, config.micro_batch_size or 1), Counts(R, M, M)
    else:
        order, longest, most = batch.order, batch.x, most_in_run(batch.s, budget)
        M = config.micro_batches(-(-max(fewest_runs(batch.s, budget), 1) // R))
        last = max(min(tuning.TIMES_FEWEST * M, n // R), M)
        multiple = config.micro_batches(M + 1) - M
        begin = begin_cost(longest, batch.s, budget)
        counts = Counts(R, M, last - last % multiple, multiple, begin)
    starts = padded_runs(Items.of(longest, most), counts, per_step=waits_once(config))
    assert starts is not None, "samples fit one by one"
    M = max(-(-(len(starts) - 1) // R), counts.fewest)
    return _placed(order, np.repeat(np.arange(len(starts) - 1), np.diff(starts)), M, batch, config)


def split_padded_groups(batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
    """Groups of several lengths and sizes, under a budget of samples: neighbours if they fit.

    As few micro-batches come first, and for these what shares one may have to be far apart: first
    fit, of micro-batches that cost at most a part of what a full one of the longest does.
    """
    assert batch.padded is not None, "see split_padded for samples"
    packed = split_by_tokens(batch, config, work)
    R, M, most = config.dp_size, packed.num_micro_batches, config.micro_batch_tokens or 1
    longest, size, found = batch.padded.longest, batch.padded.size, [packed]
    by_length = np.lexsort((-size, -longest))
    items = Items.of(longest[by_length], np.full(len(size), most), size[by_length])
    starts = padded_runs(items, Counts(R, M, M), per_step=waits_once(config))
    if starts is not None:
        labels = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        found.append(_placed(by_length, labels, M, batch, config))
    whatever = batch.dearest_first, np.argsort(-longest, kind="stable"), np.arange(len(size))
    orders = [(1.0, order) for order in whatever]
    for part, order in [*orders, *((part, by_length) for part in tuning.FIT_PARTS.tolist())]:
        level, own = (
            part * most * longest[by_length[0]],
            np.maximum(longest[order], np.finfo(float).tiny),
        )
        room = np.maximum(np.minimum(np.rint(level / own), most), size[order]).astype(np.int64)
        fits = _first_fit(size[order], R * M, room)
        found += [] if fits is None else [_placed(order, fits, M, batch, config)]
    return min(found, key=lambda parts: time_of(batch, parts, config))


def waits_once(config: PlanConfig) -> bool:
    """Whether ranks meet once a step; or there is one, which waits for nobody."""
    return config.sync is Sync.STEP or config.dp_size == 1


def _placed(order: IntArray, labels: IntArray, M: int, batch: Batch, config: PlanConfig) -> Parts:
    """Micro-batches dealt to ranks. labels: the one of each item in this order."""
    R, by_label = config.dp_size, np.argsort(labels, kind="stable")
    parts = Parts(order[by_label], np.bincount(labels, minlength=R * M).reshape(R, M))
    load = matrix(batch, parts, config.layout).ravel()
    place = places_of(load, R, M, config.sync is Sync.STEP, config.pipeline_stages)
    source = np.empty(R * M, dtype=np.int64)
    source[place] = np.arange(R * M)
    return rearranged(parts, source.reshape(R, M))


def _first_fit(size: IntArray, bins: int, most: IntArray) -> IntArray | None:
    """Micro-batch of each item, in this order, the first that has room; None if one finds none.

    most: samples of a micro-batch that begins with this item.
    """
    room, place = list[int](), list[int]()
    for each, opened in zip(size.tolist(), most.tolist(), strict=True):
        at = next((b for b, left in enumerate(room) if left >= each), len(room))
        if at == bins:
            return None
        room += [opened] if at == len(room) else []
        room[at] -= each
        place.append(at)
    return np.array(place, dtype=np.int64)
