"""Whole groups onto ranks, then micro-batches."""

from rollout_dispatcher.balance.split.groups.ranks import split_by_rank
from rollout_dispatcher.balance.split.parts import Batch, Parts
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import PlanConfig


def split_by_group(batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
    """See split/groups."""
    assert batch.group is not None, "there are no groups to keep"
    return split_by_rank(batch, batch.group, config, work)
