"""The splitters: each serves one kind of limit, as a function of the chosen samples and the config.

A new one is one file here and one line in `splitter_for`.
"""

from rollout_planner.split.groups import split_by_rank
from rollout_planner.split.parts import Batch, Splitter
from rollout_planner.splitters.by_count import split_by_count
from rollout_planner.splitters.by_tokens import split_by_tokens
from rollout_planner.splitters.padded import split_padded, split_padded_groups
from rollout_planner.types import Layout, PlanConfig


def splitter_for(batch: Batch, config: PlanConfig) -> Splitter:
    """Who cuts this batch: the first that its limits ask for."""
    if batch.group is not None:
        return split_by_rank
    if batch.padded is not None:
        return split_padded_groups
    if config.layout is Layout.PADDED and config.micro_batch_size != 1:
        return split_padded
    return split_by_tokens if config.micro_batch_size is None else split_by_count
