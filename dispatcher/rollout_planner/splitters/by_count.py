"""Packed micro-batches of a fixed number of samples."""

import numpy as np

from rollout_planner.objective import micro_batches_for
from rollout_planner.split.assign import lpt
from rollout_planner.split.partition import column_partition, step_partition
from rollout_planner.split.parts import Batch, Parts, slots_of_each
from rollout_planner.types import FloatArray, IntArray, PlanConfig, Sync
from rollout_planner.work import Work


def split_by_count(batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
    """Equal sums where ranks meet once a step, or have one micro-batch; else sorted columns."""
    R, m, n = config.dp_size, config.micro_batch_size or 1, len(batch)
    M = micro_batches_for(n, config)
    per_step = config.sync is Sync.STEP or (M == 1 and m > 1)
    m = _room(batch, R, m * M, M) if per_step else _room(batch, R * M, m)
    x, order = filled_up(batch, R * M * m)
    if per_step:
        slots = step_partition(x, R, M, m, config.pipeline_stages)
    else:
        slots = column_partition(x, R, M, m)
    return Parts.of_slots(order[slots], n)


def _room(batch: Batch, bins: int, most: int, parts: int = 1) -> int:
    """Slots of each part of a bin that may hold so many samples, as far as they are of use.

    A bin may need many for what is cheap, while the dearest have others to themselves.
    """
    enough = slots_of_each(len(batch), bins, most)
    if enough < most:
        enough = max(enough, 1 + int(np.bincount(lpt(batch.x, bins, most)).max()))
    return min(-(-enough // parts), most // parts)


def filled_up(batch: Batch, slots: int) -> tuple[FloatArray, IntArray]:
    """Falling costs and positions of all slots; an empty slot costs nothing, at position n."""
    n = len(batch)
    x, order = batch.x, batch.order
    if missing := slots - n:
        x, order = np.append(x, np.zeros(missing)), np.append(order, np.full(missing, n))
    return x, order
