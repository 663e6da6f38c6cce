"""The window strategy: samples are chosen from the whole window, and split as its limits ask.

Invariant: where the splitter's micro-steps are not the optimum, its parts wait no longer than the
greedy split's.
"""

from rollout_dispatcher.balance.objective import estimate
from rollout_dispatcher.balance.split.padded.runs import begin_cost
from rollout_dispatcher.balance.split.parts import Batch, Parts, time_of, without_fillers
from rollout_dispatcher.balance.splitters import splitter_for
from rollout_dispatcher.balance.strategies import greedy
from rollout_dispatcher.balance.strategies.strategy import PlanningStrategy
from rollout_dispatcher.plan import Layout, PlanConfig, Sync, bubble

#: Steps up to this many samples are always compared with the greedy split. Larger ones are if they
#: wait longer than this: with a fixed count, where greedy is cheap; with a token budget, where it
#: goes sample by sample, only up to a size, and if they wait longer than was thought as well.
_ALWAYS_COMPARED = 200
_CLOSE_BY_COUNT, _CLOSE_BY_TOKENS, _MOST_BY_TOKENS = 1.05, 1.01, 512


class WindowStrategy:
    """The splitter for the limits in force, or the greedy split where that is better."""

    looks_ahead = True

    def split(self, batch: Batch, config: PlanConfig) -> Parts:
        """See `PlanningStrategy`."""
        ours = without_fillers(batch, splitter_for(batch, config)(batch, config), config)
        if _settled(batch, ours, config):
            return ours
        time = time_of(batch, ours, config)
        if _good(batch, time / bubble(config.pipeline_stages, ours.num_micro_batches), config):
            return ours
        other = greedy.STRATEGY.split(batch, config)
        if not _may_be_better(other, ours, config):
            return ours
        return min(ours, other, key=lambda parts: _rating(batch, parts, config))


def _settled(batch: Batch, parts: Parts, config: PlanConfig) -> bool:
    """Whether the splitter starts from the greedy split, or has found the optimum."""
    if batch.group is not None:
        return True
    m = config.micro_batch_size
    if m is None and config.layout is Layout.PADDED:
        return len(batch) > _ALWAYS_COMPARED
    if m is None:
        return parts.num_micro_batches == 1
    padded = config.layout is Layout.PADDED and m > 1
    return not padded and (config.sync is Sync.STEP or m == 1)


def _may_be_better(other: Parts, ours: Parts, config: PlanConfig) -> bool:
    """Whether another split keeps to what comes before waiting."""
    if config.layout is Layout.PADDED and config.micro_batch_tokens is not None:
        return bool(other.counts.all()) or not ours.counts.all()  # no fillers if need not be
    return other.num_micro_batches <= ours.num_micro_batches  # greedy may need more


def _rating(batch: Batch, parts: Parts, config: PlanConfig) -> float:
    """Time, and what it costs to begin micro-steps where their number is free."""
    time = time_of(batch, parts, config)
    if config.layout is Layout.PADDED and config.micro_batch_tokens is not None:
        time += begin_cost(batch.x, batch.s, config.micro_batch_tokens) * parts.num_micro_batches
    return time


def _good(batch: Batch, time: float, config: PlanConfig) -> bool:
    """Whether comparing with the greedy split is not worth its time."""
    share = float(batch.cost.sum()) / config.dp_size
    if len(batch) <= _ALWAYS_COMPARED:
        return time <= share * (1 + 1e-9)
    if config.micro_batch_size is not None:
        return time <= share * _CLOSE_BY_COUNT
    if time <= share * _CLOSE_BY_TOKENS or len(batch) > _MOST_BY_TOKENS:
        return True
    return time <= _CLOSE_BY_TOKENS * estimate(batch.x, batch.s, config)


STRATEGY: PlanningStrategy = WindowStrategy()
