"""The window strategy: samples are chosen from the whole window, and split as its limits ask.

Invariant: what it splits never waits longer than what a plain method that it compared makes of the
same samples, and never needs more micro-batches.
"""

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.objective import estimate, lower_bound
from rollout_dispatcher.balance.split.parts import Batch, Parts, time_of
from rollout_dispatcher.balance.splitters import splitter_for
from rollout_dispatcher.balance.strategies import greedy, kk
from rollout_dispatcher.balance.strategies.strategy import PlanningStrategy
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import PlanConfig, Sync

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
        best = splitter_for(batch, config)(batch, config)
        if batch.group is not None:
            return best  # the plain methods keep groups whole in the same way
        if config.micro_batch_size == 1 and config.sync is Sync.MICRO_STEP:
            return best  # sorted columns are the optimum
        time = time_of(batch, best, config)
        small = len(batch) <= tuning.ALWAYS_COMPARED
        for plain, by_count, by_tokens in _PLAIN:
            if _is_enough(time, batch, best, config, whatever_it_waits=small):
                break
            price = by_tokens if config.micro_batch_size is None else by_count
            if not work.affords(price.of(len(batch), *best.counts.shape)):
                break
            other = plain.split(batch, config, work)
            # Fewer micro-batches come first.
            if other.num_micro_batches <= best.num_micro_batches:
                took = time_of(batch, other, config)
                best, time = (other, took) if took < time else (best, time)
            small = False
        return best


def _is_enough(
    time: float, batch: Batch, parts: Parts, config: PlanConfig, *, whatever_it_waits: bool
) -> bool:
    """Whether no comparison would improve on this time, or not by enough to be worth it."""
    if not whatever_it_waits:
        share = float(batch.cost.sum()) / config.dp_size
        if time <= share * (1 + config.target_excess):
            return True
        if config.micro_batch_size is None:
            thought = estimate(batch.x, batch.s, config)
            if time <= thought * (1 + tuning.AS_THOUGHT):
                return True
    return time <= lower_bound(batch.x, parts.num_micro_batches, config) * (1 + 1e-9)


STRATEGY: PlanningStrategy = WindowStrategy()
