"""Micro-batches of a fixed number of samples, each padded to its longest."""

from rollout_dispatcher.balance.objective import micro_batches_for
from rollout_dispatcher.balance.split.partition import padded_partition
from rollout_dispatcher.balance.split.parts import Batch, Parts
from rollout_dispatcher.balance.splitters.by_count import filled_up
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import PlanConfig, Sync


def split_padded(batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
    """Sorted runs, which pad least."""
    R, m, n = config.dp_size, config.micro_batch_size or 1, len(batch)
    M = micro_batches_for(n, config)
    if R * M * m > 2 * n:
        m = -(-n // (R * M))
    x, order = filled_up(batch, R * M * m)
    per_step, stages = config.sync is Sync.STEP, config.pipeline_stages
    return Parts.of_slots(order[padded_partition(x, R, M, m, per_step, stages=stages)], n)
