"""Packed micro-batches of any number of samples, under a budget of tokens."""

import numpy as np

from rollout_dispatcher.balance.split.leveling import spread_columns
from rollout_dispatcher.balance.split.packing import level_columns, pack
from rollout_dispatcher.balance.split.partition import step_partition
from rollout_dispatcher.balance.split.parts import Batch, Parts
from rollout_dispatcher.plan import PlanConfig, Sync


def split_by_tokens(batch: Batch, config: PlanConfig) -> Parts:
    """Bins of about equal cost in each micro-step, dealt to ranks so that their sums are close."""
    R, budget = config.dp_size, config.micro_batch_tokens or 1
    x = batch.x
    labels, M = pack(x, batch.s, R, budget, config.micro_batch_multiple)
    stages = config.pipeline_stages if config.sync is Sync.STEP else 1
    if stages > 1:  # alike on each rank as well, not only in each micro-step
        labels = level_columns(labels, x, batch.s, R=R * M, M=1, budget=budget)
    load = np.bincount(labels, weights=x, minlength=R * M).astype(np.float64)
    place = np.empty(R * M, dtype=np.int64)  # of each bin: rank * M + micro-step
    if config.sync is Sync.STEP and M > 1:
        by_cost = np.argsort(-load, kind="stable")
        place[by_cost[step_partition(load[by_cost], R, M, 1, stages).ravel()]] = np.arange(R * M)
    else:
        rank_of = spread_columns(load.reshape(M, R))
        place[:] = (rank_of * M + np.arange(M)[:, None]).ravel()
    counts = np.bincount(place[labels], minlength=R * M).reshape(R, M)
    return Parts(batch.order[np.argsort(place[labels], kind="stable")], counts)
