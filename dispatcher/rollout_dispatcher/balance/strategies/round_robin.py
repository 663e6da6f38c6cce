"""Samples dealt to ranks as they came, and cut into micro-batches in that order."""

import numpy as np

from rollout_dispatcher.balance.objective import micro_batches_for
from rollout_dispatcher.balance.split.parts import Batch, Parts
from rollout_dispatcher.balance.split.rank_groups import cut_ranks, ranks_of_groups
from rollout_dispatcher.balance.split.runs import next_fit
from rollout_dispatcher.balance.strategies.strategy import PlanningStrategy
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import IntArray, PlanConfig, round_up


class RoundRobin:
    """The i-th sample, or group, goes to rank i modulo R."""

    looks_ahead = False

    def split(self, batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
        """See `PlanningStrategy`."""
        if batch.group is not None:
            ranks, M = ranks_of_groups(batch, batch.group, config, in_turn=True)
            return cut_ranks(ranks, M, batch, config)
        if config.micro_batch_size is None:
            return _by_tokens(batch, config)
        R, m, n = config.dp_size, config.micro_batch_size, len(batch)
        M = micro_batches_for(n, config)
        return Parts.of_slots(np.arange(R * M * m).reshape(-1, R).T.reshape(R, M, m), n)


def _by_tokens(batch: Batch, config: PlanConfig) -> Parts:
    R, n = config.dp_size, len(batch)
    dealt = np.arange(round_up(n, R)).reshape(-1, R).T.ravel()
    sequence = dealt[dealt < n]
    sizes = (n - np.arange(R) + R - 1) // R
    counts = next_fit(batch.tokens[sequence], sizes, config.micro_batch_tokens or 1)
    return Parts(sequence, _rounded(counts, config))


def _rounded(counts: IntArray, config: PlanConfig) -> IntArray:
    """counts[R, M] with empty micro-batches until M is a multiple of what is asked for."""
    M = counts.shape[1]
    missing = round_up(M, config.micro_batch_multiple) - M
    return np.pad(counts, ((0, 0), (0, missing))) if missing else counts


STRATEGY: PlanningStrategy = RoundRobin()
