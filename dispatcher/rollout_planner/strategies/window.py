"""The window strategy: samples are chosen from the whole window, and split as its limits ask.

Invariant: what it splits never waits longer than what a plain method that it compared makes of the
same samples, and has more micro-batches only under a token budget, where what it costs to begin
them is weighed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from rollout_planner import tuning
from rollout_planner.objective import bound_of
from rollout_planner.split.budgets.trades import traded
from rollout_planner.split.padded.recut import recut
from rollout_planner.split.padded.runs import begin_cost
from rollout_planner.split.parts import Batch, Parts, time_of, without_fillers
from rollout_planner.splitters import splitter_for
from rollout_planner.strategies import dealt, greedy, kk, round_robin
from rollout_planner.strategies.strategy import PlanningStrategy
from rollout_planner.types import Layout, PlanConfig, Sync, bubble
from rollout_planner.work import Price, Work

#: The plain methods, the cheapest first, with their prices by count and by tokens. Round-robin is
#: the last, and has none: a plan shows what it takes anyway.
_PLAIN = (
    (greedy.STRATEGY, tuning.GREEDY_BY_COUNT, tuning.GREEDY_BY_TOKENS),
    (kk.STRATEGY, tuning.KK_BY_COUNT, tuning.KK_BY_TOKENS),
)
#: Of what is not counted.
_FREE = Price(once=0.0, sample=0.0)


class WindowStrategy:
    """The splitter for the limits in force, or a plain method where that waits less."""

    looks_ahead = True

    def split(self, batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
        """See `PlanningStrategy`."""
        best = without_fillers(batch, splitter_for(batch, config)(batch, config, work), config)
        alone = batch.group is None
        if alone and config.micro_batch_size == 1 and config.sync is Sync.MICRO_STEP:
            return best  # sorted columns are the optimum
        task = _Task(batch, config, work, best.num_micro_batches)
        if config.layout is Layout.PADDED and config.micro_batch_size != 1:
            if alone and len(batch) > tuning.ALWAYS_COMPARED:
                return best  # so many samples hardly need what a plain method makes of them
            return task.recut(task.timed(best)).parts
        timed = task.compared(task.timed(best))
        if task.may_trade:
            timed = task.traded(timed)
        return task.more_micro_batches(task.beside_arrival(timed)).parts


@dataclass(frozen=True, slots=True)
class _Timed:
    """A split, and the time that ranks need for it, in cost."""

    parts: Parts
    time: float


@dataclass(frozen=True)
class _Task:
    """What is compared: splits of one batch, as many as there is work for.

    first: micro-batches a rank of the first of them. bounds: see `bound`, once asked for.
    """

    batch: Batch
    config: PlanConfig
    work: Work
    first: int
    bounds: dict[int, float] = field(default_factory=dict)

    @cached_property
    def share(self) -> float:
        """What a rank has of all the work."""
        return float(self.batch.cost.sum()) / self.config.dp_size

    def timed(self, parts: Parts) -> _Timed:
        """These, and their time."""
        return _Timed(parts, time_of(self.batch, parts, self.config))

    def bound(self, M: int) -> float:
        """Time that no split into M micro-batches can beat."""
        if M not in self.bounds:
            self.bounds[M] = bound_of(self.batch, M, self.config)
        return self.bounds[M]

    def more_micro_batches(self, best: _Timed) -> _Timed:
        """These, or a split into up to `MORE_TRIED` micro-batches more, if that pays their price.

        None is tried where the bound is nearer than that, nor for what would hardly be noticed.
        """
        config, M = self.config, best.parts.num_micro_batches
        if not self.packs_freely:
            return best
        for more in range(M + 1, M + 1 + tuning.MORE_TRIED):
            if self.is_within_target(best) or best.time - self.bound(more) <= self.begin:
                break
            wider = replace(config, min_micro_batches=more)
            parts = splitter_for(self.batch, wider)(self.batch, wider, self.work)
            found = self.timed(without_fillers(self.batch, parts, wider))
            if found.parts.num_micro_batches > best.parts.num_micro_batches:
                best = min(best, found, key=self.rating)
        return best

    def compared(self, best: _Timed) -> _Timed:
        """These, or what a plain method makes of the same samples."""
        n, grouped = len(self.batch), self.batch.group is not None
        small = n <= (tuning.GROUPS_COMPARED_UP_TO if grouped else tuning.ALWAYS_COMPARED)
        for plain, by_count, by_tokens in _PLAIN:
            if (not small and self.is_within_target(best)) or self.is_bound(best):
                break
            if not (small and grouped) and not self.affords(best, by_count, by_tokens):
                break
            parts = plain.split(self.batch, self.config, self.work)
            best = self.better(best, parts)
            small = False
        return best

    def recut(self, best: _Timed) -> _Timed:
        """Padded: these, or what a plain method makes of them, whole groups cut anew as well."""
        if self.is_bound(best):
            return best
        plain = list(self.plain_parts(best))
        cut = self.batch.group is not None
        again = [recut(self.batch, each, self.config, self.work) for each in plain if cut]
        for parts in (*plain, *again):
            best = self.better(best, parts)
        return best

    def plain_parts(self, best: _Timed) -> Iterator[Parts]:
        """What the plain methods make of them, as far as the work goes."""
        for plain in (dealt, greedy, kk, round_robin):
            if not self.affords(best):
                break
            yield without_fillers(
                self.batch, plain.STRATEGY.split(self.batch, self.config, self.work), self.config
            )

    def beside_arrival(self, best: _Timed) -> _Timed:
        """These, or samples dealt as they came, which a plan shows beside them."""
        if self.is_within_target(best) or self.is_bound(best):
            return best
        if self.batch.group is not None and not self.affords(best):
            return best
        parts = round_robin.STRATEGY.split(self.batch, self.config, self.work)
        return self.better(best, without_fillers(self.batch, parts, self.config))

    def affords(self, best: _Timed, by_count: Price = _FREE, by_tokens: Price = _FREE) -> bool:
        """Whether there is work for a plain method, of these prices unless groups stay whole."""
        if self.batch.group is not None:
            by_count, by_tokens = tuning.GROUPS_BY_COUNT, tuning.GROUPS_BY_TOKENS
        price = by_count if self.config.micro_batch_tokens is None else by_tokens
        return self.work.affords(price.of(len(self.batch), *best.parts.counts.shape))

    def better(self, best: _Timed, parts: Parts) -> _Timed:
        """The better of the two, if the second keeps to what comes before waiting."""
        if not self.may_be_better(parts, best.parts):
            return best
        other, fewer = self.timed(parts), parts.num_micro_batches < best.parts.num_micro_batches
        longer = fewer and self.batch.group is not None and not self.config.pads_to_budget
        worth = tuning.WORTH_A_MICRO_BATCH if longer else 1.0
        return other if self.rating(other) < self.rating(best) * worth else best

    @property
    def may_trade(self) -> bool:
        """Whether what is left to gain is a matter of which samples share a budget."""
        return self.packs_freely and self.config.dp_size > 1 and self.config.pipeline_stages == 1

    @property
    def packs_freely(self) -> bool:
        """Whether micro-batches are packed under a token budget, and no groups stay together."""
        budget, packed = self.config.micro_batch_tokens, self.config.layout is Layout.PACKED
        return budget is not None and packed and self.batch.group is None

    def traded(self, best: _Timed) -> _Timed:
        """After trades between micro-batches; of many samples single ones hardly matter."""
        enough = self.bound(best.parts.num_micro_batches) * (1 + tuning.TRADED_TO)
        if best.time <= enough or len(self.batch) > tuning.ALWAYS_COMPARED:
            return best
        work = (
            self.work.share(tuning.WORK_WITHIN_TARGET) if self.is_within_target(best) else self.work
        )
        found = self.timed(traded(self.batch, best.parts, self.config, enough, work))
        return min(best, found, key=lambda each: each.time)

    def is_within_target(self, found: _Timed) -> bool:
        """Whether these wait no longer than is compared with anything."""
        return self.worked(found) <= self.share * (1 + self.config.compared_above)

    def is_bound(self, found: _Timed) -> bool:
        """Whether nothing improves on these."""
        return found.time <= self.bound(found.parts.num_micro_batches) * (1 + 1e-9)

    def worked(self, found: _Timed) -> float:
        """Their time, without what it takes to fill and drain a pipeline."""
        return found.time / bubble(self.config.pipeline_stages, found.parts.num_micro_batches)

    def may_be_better(self, other: Parts, ours: Parts) -> bool:
        """Whether another split keeps to what comes before waiting: few micro-batches, no fillers.

        Of budgets of padded tokens their number is weighed, up to what the splitter may have.
        """
        theirs = other.num_micro_batches
        more = theirs > ours.num_micro_batches
        if not self.config.pads_to_budget:
            return not more
        if more and theirs > tuning.TIMES_FEWEST * self.first:
            return False
        if not more:
            return True  # a rank of few samples has fillers, whoever they are
        return bool(other.counts.all()) or not ours.counts.all()

    def rating(self, found: _Timed) -> float:
        """Time, and what it costs to begin micro-steps where their number is free."""
        return found.time + self.begin * found.parts.num_micro_batches

    @cached_property
    def begin(self) -> float:
        """What it costs to begin a micro-step, where their number is free."""
        budget = self.config.micro_batch_tokens
        return 0.0 if budget is None else begin_cost(self.batch.x, self.batch.s, budget)


STRATEGY: PlanningStrategy = WindowStrategy()
