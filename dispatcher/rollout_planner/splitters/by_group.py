"""Whole groups onto ranks, then micro-batches."""

from rollout_planner.split.groups.ranks import split_by_rank
from rollout_planner.split.parts import Batch, Parts
from rollout_planner.types import PlanConfig
from rollout_planner.work import Work


def split_by_group(batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
    """See split/groups."""
    assert batch.group is not None, "there are no groups to keep"
    return split_by_rank(batch, batch.group, config, work)
