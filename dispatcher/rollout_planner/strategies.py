"""The strategies: who trains on what, by each name in `Strategy`; `window` is the one that plans.

Invariant: what `window` splits never waits longer than what a plain method that it compared makes
of the same samples, and has more micro-batches only under a token budget, where what it costs to
begin them is weighed.

A new one is a function of a batch and a config, a name in `Strategy` and a line in `STRATEGIES`;
nothing else asks which strategy it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from rollout_planner import tuning
from rollout_planner.objective import bound_of
from rollout_planner.split.assign import lpt_budget
from rollout_planner.split.groups import (
    Share,
    by_neighbours,
    group_items,
    in_turn,
    members_of_items,
    split_plainly,
)
from rollout_planner.split.padded import begin_of
from rollout_planner.split.parts import Batch, Parts, Work, evenly, time_of, without_fillers
from rollout_planner.split.recut import recut
from rollout_planner.split.splitters import packed_plainly, splitter_for
from rollout_planner.split.trades import traded
from rollout_planner.split.uneven import for_speeds
from rollout_planner.types import Grouping, Layout, PlanConfig, Strategy, Sync, bubble

#: The micro-batches of every rank, the same number for each, within the config's caps.
Split = Callable[[Batch, PlanConfig], Parts]


# Plain methods: samples, or groups, go to ranks, whose micro-batches are as full as they may be.


def _round_robin(batch: Batch, config: PlanConfig) -> Parts:
    """As samples, or groups, came; what nobody asked to be more micro-batches stays so."""
    parts = split_plainly(batch, config, in_turn, as_came=True)
    return without_fillers(batch, parts) if config.micro_batches(1) > 1 else parts


def _dealt(batch: Batch, config: PlanConfig) -> Parts:
    """The dearest first, in turn: ranks of like samples, for padded layouts. It has no name."""
    parts = split_plainly(batch, config, in_turn)
    if batch.group is None and config.micro_batch_size is not None:
        parts = Parts(parts.sequence, evenly(parts.counts.sum(axis=1), parts.num_micro_batches))
    return without_fillers(batch, parts)


def _shared(share: Share) -> Split:
    """Who goes to which rank is all that it says."""
    return lambda batch, config: without_fillers(batch, split_plainly(batch, config, share))


#: LPT: the largest first, always to the least loaded rank. Karmarkar-Karp: ranks of equally many
#: samples and nearly equal sums.
_greedy, _kk = _shared(lpt_budget), _shared(by_neighbours)


# The window: the splitter for the limits in force, or a plain method where that waits less.


class _Best:
    """The best split of a batch so far: at first the splitter's."""

    def __init__(self, batch: Batch, config: PlanConfig) -> None:
        self.batch, self.config, self.work = batch, config, Work(config.planning_budget)
        self.padded = config.layout is Layout.PADDED and config.micro_batch_size != 1
        self.parts = self.by_limits(config)
        self.time, self.first = time_of(batch, self.parts, config), self.parts.num_micro_batches
        self.share = float(batch.cost.sum()) / config.capacity
        #: What it costs to begin a micro-step, where their number is free.
        self.begin = begin_of(batch, config)
        several = config.dp_size > 1 and config.pipeline_stages == 1
        small = batch.group is None and len(batch) <= tuning.SMALL_STEP
        self.trades = several and small and not self.padded

    def by_limits(self, config: PlanConfig) -> Parts:
        """What the splitter for these limits makes of it."""
        found = splitter_for(self.batch, config)(self.batch, config, self.work)
        parts = without_fillers(self.batch, found)
        return parts if config.slowness is None else for_speeds(self.batch, parts, config)

    def bound(self, M: int) -> float:
        """Time that no split into M micro-batches can beat."""
        return bound_of(self.batch, M, self.config)

    def price(self) -> float:
        """What it takes, with what it costs to begin each micro-step."""
        return self.time + self.begin * self.parts.num_micro_batches

    def is_within_target(self) -> bool:
        """Whether it waits no longer than is compared, but for filling and draining pipelines."""
        worked = self.time / bubble(self.config.pipeline_stages, self.parts.num_micro_batches)
        return worked <= self.share * (1 + self.config.compared_above)

    def is_settled(self) -> bool:
        """Whether nothing improves on it that would be noticed."""
        at_bound = self.time <= self.bound(self.parts.num_micro_batches) * (1 + tuning.ROUNDING)
        return at_bound or self.is_within_target()

    def offer(self, parts: Parts, *, more: bool = False) -> None:
        """Take these, or what trades or other ends of padded runs make of them, if that waits less.

        more: see `take`.
        """
        parts = without_fillers(self.batch, parts)
        self.take(parts, more=more)
        if self.padded and self.batch.group is not None:
            self.take(recut(self.batch, parts, self.config, self.work))
        elif self.trades:
            enough = self.bound(parts.num_micro_batches) * (1 + tuning.TOLERANCE)
            if self.time > enough:
                self.take(traded(self.batch, parts, self.config, enough, self.work), more=more)

    def take(self, parts: Parts, *, more: bool = False) -> None:
        """Take these if they wait less, with what it costs to begin each micro-step.

        more: these may be more micro-batches, which is weighed; else so they may only of budgets of
        padded tokens, up to what the splitter may have, and if that leaves no more of them empty.
        """
        config, time = self.config, time_of(self.batch, parts, self.config)
        theirs, ours = parts.num_micro_batches, self.parts.num_micro_batches
        if theirs > ours and not more:
            most = tuning.TIMES_FEWEST * self.first if config.pads_to_budget else 0
            if theirs > most or not (parts.counts.all() or not self.parts.counts.all()):
                return
        if time + self.begin * theirs < self.price():
            self.parts, self.time = parts, time


def _window(batch: Batch, config: PlanConfig) -> Parts:
    """The splitter's, or what waits less: trades, more micro-batches, what others make of it."""
    best, n, alone = _Best(batch, config), len(batch), batch.group is None
    if alone and config.micro_batch_size == 1 and config.sync is Sync.MICRO_STEP:
        return best.parts  # sorted columns are the optimum
    if best.trades:
        best.offer(best.parts)
    if alone and config.micro_batch_size is None and not best.padded:
        M = best.parts.num_micro_batches
        for more in range(M + 1, M + 1 + tuning.MORE_TRIED):
            if best.is_within_target() or best.time - best.bound(more) <= best.begin:
                break
            best.take(best.by_limits(replace(config, min_micro_batches=more)), more=True)
        if n <= tuning.COMPARED_UP_TO:
            for parts in packed_plainly(batch, config, best.price()):
                best.offer(parts, more=True)
        return best.parts
    compared = tuning.SMALL_STEP if best.padded and alone else tuning.COMPARED_UP_TO
    for plain in (_dealt, *PLAIN) if best.padded else PLAIN:
        if n > compared or best.is_settled():
            break
        best.offer(plain(batch, config))
    return best.parts


#: The plain methods that users may name, the cheapest first but for that which a plan shows anyway.
PLAIN: tuple[Split, ...] = (_greedy, _kk, _round_robin)

STRATEGIES: Mapping[Strategy, Split] = {
    Strategy.ROUND_ROBIN: _round_robin,
    Strategy.GREEDY: _greedy,
    Strategy.KK: _kk,
    Strategy.WINDOW: _window,
}
#: Those that may take any samples of the window. Others take the oldest: for them a window larger
#: than a dispatch batch would be waiting for nothing.
_LOOK_AHEAD = {Strategy.WINDOW}


def looks_ahead(strategy: str, max_split: int = 1) -> bool:
    """Whether the strategy of this name chooses from a window; the others take the oldest.

    So does each where samples may be split: what a window is for is done by splitting then.
    """
    return strategy in _LOOK_AHEAD and max_split == 1


def split(batch: Batch, config: PlanConfig) -> Parts:
    """By the config's strategy; groups that stay in one micro-batch as samples are elsewhere."""
    strategy = STRATEGIES[config.strategy]
    if batch.group is None or config.grouping is not Grouping.MICRO_BATCH:
        return strategy(batch, config)
    items, own = group_items(batch, batch.group, config)
    return members_of_items(strategy(items, own), batch.group)


def plain_split(batch: Batch, config: PlanConfig) -> Parts:
    """What a trainer does without any of this: samples dealt to ranks as they came."""
    return _round_robin(batch if batch.group is None else replace(batch, group=None), config)
