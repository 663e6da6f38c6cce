"""Strategies that share samples out over ranks first, and then cut each rank's into micro-batches.

Invariant: ranks keep their samples by falling cost; whole groups go to ranks in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rollout_planner.objective import micro_batches_for
from rollout_planner.order import by_label
from rollout_planner.split.groups import Share, split_plainly
from rollout_planner.split.parts import Batch, Parts, slots_of_each, without_fillers
from rollout_planner.split.runs import cut_ranks
from rollout_planner.types import FloatArray, IntArray, PlanConfig, cut
from rollout_planner.work import Work

#: Rank of each item of falling cost `x` among R ranks, which may take so many items each.
Assign = Callable[[FloatArray, int, int], IntArray]


@dataclass(frozen=True, slots=True)
class RankByRank:
    """Ranks by `assign`, or by `share` if whole groups stay on one; then micro-batches in order.

    Each of these has as many samples or tokens as it may hold.
    """

    assign: Assign
    share: Share
    looks_ahead: bool = False

    def split(self, batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
        """See `PlanningStrategy`."""
        if batch.group is not None:
            parts = split_plainly(batch, config, self.share)
        elif config.micro_batch_size is None:
            parts = self._by_tokens(batch, config)
        else:
            parts = self._by_count(batch, config, config.micro_batch_size)
        return without_fillers(batch, parts, config)

    def _by_count(self, batch: Batch, config: PlanConfig, m: int) -> Parts:
        R, n = config.dp_size, len(batch)
        M = micro_batches_for(n, config)
        x = np.append(batch.x, np.zeros(R * slots_of_each(n, R, M * m) - n))
        labels = self.assign(x, R, M * m)[:n]
        sequence = batch.order[by_label(labels, R)]
        return Parts.of_ranks(sequence, np.bincount(labels, minlength=R), M, m)

    def _by_tokens(self, batch: Batch, config: PlanConfig) -> Parts:
        R = config.dp_size
        rank_of = np.empty(len(batch), dtype=np.int64)
        rank_of[batch.dearest_first] = labels = self.assign(batch.falling, R, len(batch))
        by_rank = batch.order[np.argsort(rank_of[batch.order], kind="stable")]
        ranks = cut(by_rank, np.bincount(labels, minlength=R).tolist())
        return cut_ranks(ranks, 1, batch, config)
