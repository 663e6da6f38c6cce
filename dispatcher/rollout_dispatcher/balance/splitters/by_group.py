"""Whole groups onto ranks, then micro-batches."""

from rollout_dispatcher.balance.split.parts import Batch, Parts, time_of
from rollout_dispatcher.balance.split.rank_groups import cut_ranks, deal, ranks_of_groups
from rollout_dispatcher.plan import PlanConfig


def split_by_group(batch: Batch, config: PlanConfig) -> Parts:
    """The better of two ways to cut a rank's samples: in runs, or dealt in turn."""
    assert batch.group is not None, "there are no groups to keep"
    ranks, M = ranks_of_groups(batch, batch.group, config)
    runs = cut_ranks(ranks, M, batch, config)
    if config.micro_batch_size is None:
        return runs
    dealt = Parts.of_lists(deal(ranks, M), config)
    return dealt if time_of(batch, dealt, config) < time_of(batch, runs, config) else runs
