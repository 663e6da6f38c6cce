"""Padded micro-batches of any number of samples, under a budget of padded tokens."""

import numpy as np

from rollout_dispatcher.balance.split.padded.runs import padded_runs
from rollout_dispatcher.balance.split.parts import Batch, Parts
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import PlanConfig, Sync


def split_padded_by_tokens(batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
    """Sorted runs, which pad least, of like cost in each micro-step."""
    R, budget = config.dp_size, config.micro_batch_tokens or 1
    per_step = config.sync is Sync.STEP
    runs = padded_runs(batch.x, batch.s, R, budget, config.micro_batches, per_step=per_step)
    place = np.repeat(runs.place, np.diff(runs.starts))
    counts = np.bincount(place, minlength=R * runs.M).reshape(R, runs.M)
    return Parts(batch.order[np.argsort(place, kind="stable")], counts)
