"""The window strategy: samples are chosen from the whole window, and split as its limits ask.

Invariant: what it splits never waits longer than what a plain method that it compared makes of the
same samples, and never needs more micro-batches.
"""

from dataclasses import dataclass
from functools import cached_property

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
        task = _Task(batch, config, work)
        timed = task.compared(task.timed(best))
        return task.traded(timed) if task.may_trade else timed.parts


@dataclass(frozen=True, slots=True)
class _Timed:
    """A split, and the time that ranks need for it, in cost."""

    parts: Parts
    time: float


@dataclass(frozen=True)
class _Task:
    """What is compared: splits of one batch, as many as there is work for."""

    batch: Batch
    config: PlanConfig
    work: Work

    @cached_property
    def share(self) -> float:
        """What a rank has of all the work."""
        return float(self.batch.cost.sum()) / self.config.dp_size

    @cached_property
    def thought(self) -> float:
        """What a good split is thought to take."""
        return estimate(self.batch.x, self.batch.s, self.config)

    def timed(self, parts: Parts) -> _Timed:
        """These, and their time."""
        return _Timed(parts, time_of(self.batch, parts, self.config))

    def bound(self, M: int) -> float:
        """Time that no split into M micro-batches can beat."""
        return lower_bound(self.batch.x, M, self.config)

    def compared(self, best: _Timed) -> _Timed:
        """These, or what a plain method makes of the same samples."""
        n, by_tokens = len(self.batch), self.config.micro_batch_size is None
        small = n <= tuning.ALWAYS_COMPARED
        for plain, price_by_count, price_by_tokens in _PLAIN:
            if self.is_bound(best) or (not small and self.is_within_target(best)):
                break
            price = price_by_tokens if by_tokens else price_by_count
            if not self.work.affords(price.of(n, *best.parts.counts.shape)):
                break
            other = plain.split(self.batch, self.config, self.work)
            if _may_be_better(other, best.parts, self.config):
                best = min(best, self.timed(other), key=self.rating)
            small = False
        return best

    @property
    def may_trade(self) -> bool:
        """Whether what is left to gain is a matter of which samples share a budget."""
        config = self.config
        packed = config.micro_batch_tokens is not None and config.layout is Layout.PACKED
        return packed and config.dp_size > 1 and config.pipeline_stages == 1

    def traded(self, best: _Timed) -> Parts:
        """After trades between micro-batches, from these or from Karmarkar-Karp."""
        batch, config, work = self.batch, self.config, self.work
        R, M = best.parts.counts.shape
        enough = self.bound(M) * (1 + tuning.TRADED_TO)
        if best.time <= enough:
            return best.parts
        if self.is_enough(best):
            if len(batch) > tuning.ALWAYS_COMPARED:
                return best.parts
            work = work.share(tuning.WORK_WITHIN_TARGET)
        starts = [best.parts]
        if work.affords(tuning.KK_BY_TOKENS.of(len(batch), R, 0)):
            other = by_differences(batch, M, config)
            starts += [] if other is None else [other]
        found = self.timed(traded(batch, starts, config, enough, work))
        return min(best, found, key=lambda each: each.time).parts

    def is_enough(self, found: _Timed) -> bool:
        """Whether trades would not improve on these, or not by enough to be worth it."""
        if self.is_within_target(found):
            return True
        return self.worked(found) <= self.thought * (1 + tuning.AS_THOUGHT)

    def is_within_target(self, found: _Timed) -> bool:
        """Whether these wait no longer than is compared with anything."""
        return self.worked(found) <= self.share * (1 + self.config.compared_above)

    def is_bound(self, found: _Timed) -> bool:
        """Whether nothing improves on these."""
        return found.time <= self.bound(found.parts.num_micro_batches) * (1 + 1e-9)

    def worked(self, found: _Timed) -> float:
        """Their time, without what it takes to fill and drain a pipeline."""
        return found.time / bubble(self.config.pipeline_stages, found.parts.num_micro_batches)

    def rating(self, found: _Timed) -> float:
        """Time, and what it costs to begin micro-steps where their number is free."""
        if not self.config.pads_to_budget:
            return found.time
        begin = begin_cost(self.batch.x, self.batch.s, self.config.micro_batch_tokens or 1)
        return found.time + begin * found.parts.num_micro_batches


def _may_be_better(other: Parts, ours: Parts, config: PlanConfig) -> bool:
    """Whether another split keeps to what comes before waiting: few micro-batches, no fillers."""
    if other.num_micro_batches > ours.num_micro_batches:
        return False
    return not config.pads_to_budget or bool(other.counts.all()) or not ours.counts.all()


STRATEGY: PlanningStrategy = WindowStrategy()
