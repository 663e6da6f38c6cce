"""The window strategy: samples are chosen from the whole window, and split as its limits ask.

Invariant: what it splits never waits longer than what a plain method that it compared makes of the
same samples, and never needs more micro-batches.
"""

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.objective import estimate, lower_bound
from rollout_dispatcher.balance.split.budgets.differences import by_differences
from rollout_dispatcher.balance.split.budgets.trades import traded
from rollout_dispatcher.balance.split.padded.runs import begin_cost
from rollout_dispatcher.balance.split.parts import Batch, Parts, time_of, without_fillers
from rollout_dispatcher.balance.splitters import splitter_for
from rollout_dispatcher.balance.strategies import greedy, kk
from rollout_dispatcher.balance.strategies.strategy import PlanningStrategy
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import Layout, PlanConfig, Sync, bubble

#: The plain methods, the cheapest first, with their prices by count and by tokens.
_PLAIN = (
    (greedy.STRATEGY, tuning.GREEDY_BY_COUNT, tuning.GREEDY_BY_TOKENS),
    (kk.STRATEGY, tuning.KK_BY_COUNT, tuning.KK_BY_TOKENS),
)


class WindowStrategy:
    """The splitter for the limits in force, or a plain method where that waits less."""

    looks_ahead = True

    def split(self, batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
        """See `PlanningStrategy`."""
        best = without_fillers(batch, splitter_for(batch, config)(batch, config, work), config)
        if batch.group is not None:
            return best  # the plain methods keep groups whole in the same way
        if config.micro_batch_size == 1 and config.sync is Sync.MICRO_STEP:
            return best  # sorted columns are the optimum
        best = _compared(batch, best, config, work)
        return _traded(batch, best, config, work) if _may_trade(config) else best


def _compared(batch: Batch, best: Parts, config: PlanConfig, work: Work) -> Parts:
    """These, or what a plain method makes of the same samples."""
    small = len(batch) <= tuning.ALWAYS_COMPARED
    for plain, by_count, by_tokens in _PLAIN:
        if _is_enough(batch, best, config, whatever_it_waits=small):
            break
        price = by_tokens if config.micro_batch_size is None else by_count
        if not work.affords(price.of(len(batch), *best.counts.shape)):
            break
        other = plain.split(batch, config, work)
        if _may_be_better(other, best, config):
            best = min(best, other, key=lambda parts: _rating(batch, parts, config))
        small = False
    return best


def _may_trade(config: PlanConfig) -> bool:
    """Whether what is left to gain is a matter of which samples share a budget."""
    packed = config.micro_batch_tokens is not None and config.layout is Layout.PACKED
    return packed and config.dp_size > 1 and config.pipeline_stages == 1


def _traded(batch: Batch, parts: Parts, config: PlanConfig, work: Work) -> Parts:
    """After trades between micro-batches, from these or from Karmarkar-Karp."""
    R, M = parts.counts.shape
    enough = lower_bound(batch.x, M, config) * (1 + tuning.TRADED_TO)
    if time_of(batch, parts, config) <= enough:
        return parts
    if _is_enough(batch, parts, config, whatever_it_waits=False):
        if len(batch) > tuning.ALWAYS_COMPARED:
            return parts
        work = work.share(tuning.WORK_WITHIN_TARGET)
    starts = [parts]
    if work.affords(tuning.KK_BY_TOKENS.of(len(batch), R, 0)):
        other = by_differences(batch, M, config)
        starts += [] if other is None else [other]
    found = traded(batch, starts, config, enough, work)
    return min(parts, found, key=lambda each: time_of(batch, each, config))


def _is_enough(batch: Batch, parts: Parts, config: PlanConfig, *, whatever_it_waits: bool) -> bool:
    """Whether no comparison would improve on these, or not by enough to be worth it."""
    time, M = time_of(batch, parts, config), parts.num_micro_batches
    if not whatever_it_waits:
        worked = time / bubble(config.pipeline_stages, M)
        share = float(batch.cost.sum()) / config.dp_size
        if worked <= share * (1 + config.target_excess):
            return True
        if config.micro_batch_size is None:
            thought = estimate(batch.x, batch.s, config)
            if worked <= thought * (1 + tuning.AS_THOUGHT):
                return True
    return time <= lower_bound(batch.x, M, config) * (1 + 1e-9)


def _may_be_better(other: Parts, ours: Parts, config: PlanConfig) -> bool:
    """Whether another split keeps to what comes before waiting: few micro-batches, no fillers."""
    if other.num_micro_batches > ours.num_micro_batches:
        return False
    return not config.pads_to_budget or bool(other.counts.all()) or not ours.counts.all()


def _rating(batch: Batch, parts: Parts, config: PlanConfig) -> float:
    """Time, and what it costs to begin micro-steps where their number is free."""
    time = time_of(batch, parts, config)
    if config.pads_to_budget:
        begin = begin_cost(batch.x, batch.s, config.micro_batch_tokens or 1)
        time += begin * parts.num_micro_batches
    return time


STRATEGY: PlanningStrategy = WindowStrategy()
