"""Samples dealt to ranks as they came, and cut into micro-batches in that order."""

import numpy as np

from rollout_planner.objective import micro_batches_for
from rollout_planner.split.groups import in_turn, split_plainly
from rollout_planner.split.parts import Batch, Parts, without_fillers
from rollout_planner.split.runs import cut_ranks, next_fit
from rollout_planner.strategies.strategy import PlanningStrategy
from rollout_planner.types import IntArray, Layout, PlanConfig, round_up
from rollout_planner.work import Work


class RoundRobin:
    """The i-th sample, or group, goes to rank i modulo R."""

    looks_ahead = False

    def split(self, batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
        """See `PlanningStrategy`; what nobody asked to be more micro-batches stays as it came."""
        parts = self._as_they_came(batch, config)
        asked = config.micro_batches(1) > 1
        return without_fillers(batch, parts, config) if asked else parts

    @staticmethod
    def _as_they_came(batch: Batch, config: PlanConfig) -> Parts:
        if batch.group is not None:
            return split_plainly(batch, config, in_turn, as_came=True)
        if config.micro_batch_size is None:
            return _by_tokens(batch, config)
        R, m, n = config.dp_size, config.micro_batch_size, len(batch)
        sequence, sizes = _dealt(n, R)
        return Parts.of_ranks(sequence, sizes, micro_batches_for(n, config), m)


def _by_tokens(batch: Batch, config: PlanConfig) -> Parts:
    R, n = config.dp_size, len(batch)
    if config.layout is Layout.PADDED:
        return cut_ranks([np.arange(r, n, R) for r in range(R)], 1, batch, config)
    sequence, sizes = _dealt(n, R)
    counts = next_fit(batch.tokens[sequence], sizes, config.micro_batch_tokens or 1)
    return Parts(sequence, _rounded(counts, config))


def _dealt(n: int, R: int) -> tuple[IntArray, IntArray]:
    """Samples of each rank, rank by rank, and how many each has."""
    dealt = np.arange(round_up(n, R)).reshape(-1, R).T.ravel()
    sizes = np.full(R, len(dealt) // R)
    if len(dealt) > n:
        dealt = dealt[dealt < n]
        sizes[n % R :] -= 1
    return dealt, sizes


def _rounded(counts: IntArray, config: PlanConfig) -> IntArray:
    """counts[R, M] with empty micro-batches until there are as many as asked for."""
    M = counts.shape[1]
    missing = config.micro_batches(M) - M
    return np.pad(counts, ((0, 0), (0, missing))) if missing else counts


STRATEGY: PlanningStrategy = RoundRobin()
