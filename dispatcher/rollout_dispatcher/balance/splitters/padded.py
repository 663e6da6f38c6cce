"""Micro-batches of a fixed number of samples, each padded to its longest."""

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.objective import micro_batches_for
from rollout_dispatcher.balance.split.padded.shared import Items, shared_runs
from rollout_dispatcher.balance.split.partition import padded_partition
from rollout_dispatcher.balance.split.parts import Batch, Padded, Parts, time_of, without_fillers
from rollout_dispatcher.balance.splitters.by_count import filled_up
from rollout_dispatcher.balance.splitters.by_tokens import split_by_tokens
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import PlanConfig, Sync


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
    found = _neighbours(batch, config, M, most, work)
    return min((full, *found), key=lambda parts: time_of(batch, parts, config))


def split_padded_groups(batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
    """Groups of several lengths and sizes, under a budget of samples: neighbours if they fit.

    As few micro-batches come first, and for these what shares one may have to be far apart.
    """
    packed = split_by_tokens(batch, config, work)
    M = packed.num_micro_batches
    found = _neighbours(batch, config, M, config.micro_batch_tokens or 1, work)
    return min((packed, *found), key=lambda parts: time_of(batch, parts, config))


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
