"""Packed micro-batches of any number of samples, under a budget of tokens."""

from typing import Any

import numpy as np

from rollout_planner.order import by_label
from rollout_planner.split.assign import Labels
from rollout_planner.split.budgets.ranks import pack_ranks
from rollout_planner.split.leveling import spread_columns
from rollout_planner.split.packing import level_columns, pack
from rollout_planner.split.partition import bins_onto_ranks
from rollout_planner.split.parts import Batch, Parts, time_of
from rollout_planner.types import PlanConfig, Sync
from rollout_planner.work import Work


def split_by_tokens(batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
    """Ranks of equal cost, or micro-steps whose micro-batches cost about the same."""
    if config.sync is Sync.MICRO_STEP:
        return _parts(batch, config, *_in_columns(batch, config))
    ours = _parts(batch, config, *pack_ranks(batch.x, batch.s, **_limits(config)))
    if config.pipeline_stages == 1:
        return ours
    level = _parts(batch, config, *_for_pipelines(batch, config))
    fits = level.num_micro_batches <= ours.num_micro_batches
    return level if fits and time_of(batch, level, config) < time_of(batch, ours, config) else ours


def _parts(batch: Batch, config: PlanConfig, place: Labels, M: int) -> Parts:
    R = config.dp_size
    counts = np.bincount(place, minlength=R * M).reshape(R, M)
    return Parts(batch.order[by_label(place, R * M)], counts)


def _limits(config: PlanConfig) -> dict[str, Any]:
    return {
        "R": config.dp_size,
        "budget": config.micro_batch_tokens or 1,
        "allowed": config.micro_batches,
    }


def _in_columns(batch: Batch, config: PlanConfig) -> tuple[Labels, int]:
    """Bins of each micro-step go to ranks so that their sums are close."""
    R = config.dp_size
    labels, M = pack(batch.x, batch.s, **_limits(config))
    load = np.bincount(labels, weights=batch.x, minlength=R * M).astype(np.float64)
    rank_of = spread_columns(load.reshape(M, R))
    return (rank_of * M + np.arange(M)[:, None]).ravel()[labels], M


def _for_pipelines(batch: Batch, config: PlanConfig) -> tuple[Labels, int]:
    """Bins alike on each rank as well, dealt so that ranks fill, work and drain equally long."""
    R, x = config.dp_size, batch.x
    labels, M = pack(x, batch.s, **_limits(config))
    budget = config.micro_batch_tokens or 1
    labels = level_columns(labels, x, batch.s, R=R * M, M=1, budget=budget)
    load = np.bincount(labels, weights=x, minlength=R * M).astype(np.float64)
    return bins_onto_ranks(load, R, M, config.pipeline_stages)[labels], M
