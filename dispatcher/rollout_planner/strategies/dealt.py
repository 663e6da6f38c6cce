"""Samples dealt to ranks in turn, the dearest first: ranks of like samples, for padded layouts.

No name in `Strategy`: what plans are compared with, beside the plain methods that users may name.
"""

import numpy as np

from rollout_planner.objective import micro_batches_for
from rollout_planner.split.groups import in_turn, split_plainly
from rollout_planner.split.parts import Batch, Parts, evenly, without_fillers
from rollout_planner.split.runs import cut_ranks
from rollout_planner.strategies.strategy import PlanningStrategy
from rollout_planner.types import PlanConfig
from rollout_planner.work import Work


class Dealt:
    """Then as many samples in each micro-batch of a rank, or as many as its budget holds."""

    looks_ahead = False

    def split(self, batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
        """See `PlanningStrategy`."""
        if batch.group is not None:
            parts = split_plainly(batch, config, in_turn)
        else:
            parts = self._alone(batch, config)
        return without_fillers(batch, parts, config)

    @staticmethod
    def _alone(batch: Batch, config: PlanConfig) -> Parts:
        ranks = [batch.dearest_first[r :: config.dp_size] for r in range(config.dp_size)]
        if config.micro_batch_size is None:
            return cut_ranks(ranks, 1, batch, config)
        M, sizes = micro_batches_for(len(batch), config), np.array(list(map(len, ranks)))
        return Parts(np.concatenate(ranks), evenly(sizes, M))


STRATEGY: PlanningStrategy = Dealt()
