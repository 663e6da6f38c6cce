"""The strategies: who trains on what, by each name in `Strategy`; `window` is the one that plans.

Invariant: what `window` splits never waits longer than what a plain method that it compared makes
of the same samples, and has more micro-batches only under a token budget, where what it costs to
begin them is weighed.

*Splitters*, first, each serve one kind of limit, as a function of the chosen samples and the
config: packed micro-batches of a fixed number of samples, packed ones under a budget of tokens,
padded ones of a number of samples at most or under a budget of padded tokens; whole groups are in
groups.py. A new one is a function here and a line in `splitter_for`.

A new strategy is a function of a batch and a config, a name in `Strategy` and a line in
`STRATEGIES`; only `looks_ahead` asks which strategy it is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from rollout_planner import tuning
from rollout_planner.objective import bound_of, micro_batches_for, rank_bound
from rollout_planner.order import by_label
from rollout_planner.split import assign, packing, padded
from rollout_planner.split.groups import (
    Share,
    by_neighbours,
    cut_ranks,
    group_items,
    in_turn,
    members_of_items,
    split_by_rank,
    split_plainly,
)
from rollout_planner.split.parts import (
    Batch,
    Parts,
    Splitter,
    Work,
    by_falling_load,
    evenly,
    matrix,
    time_of,
    without_fillers,
)
from rollout_planner.split.recut import recut
from rollout_planner.split.trades import traded
from rollout_planner.split.uneven import for_speeds
from rollout_planner.types import (
    Grouping,
    IntArray,
    Layout,
    PlanConfig,
    Strategy,
    Sync,
    bubble,
    cut,
)

# Splitters: limits in force.


def splitter_for(batch: Batch, config: PlanConfig) -> Splitter:
    """Who cuts this batch: the first that its limits ask for."""
    if batch.group is not None:
        return split_by_rank
    if batch.padded is not None:
        return split_padded_groups
    if config.layout is Layout.PADDED and config.micro_batch_size != 1:
        return split_padded
    return split_packed


def split_packed(batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
    """Ranks of equal cost, or micro-steps whose micro-batches cost about the same.

    Where a micro-batch has room for so many samples, each takes one of it. Of a pipeline
    micro-batches are alike on each rank as well, if it takes less.
    """
    R, x, s, order = config.dp_size, batch.x, batch.s, batch.order
    budget, per_step = config.micro_batch_tokens, config.sync is Sync.STEP
    if budget is None:
        x, s, order = batch.falling, np.ones_like(s), batch.dearest_first
        budget = config.micro_batch_size or 1
    ways, stages = list[Parts](), config.pipeline_stages
    M = micro_batches_for(len(x), config)
    if per_step and config.micro_batch_size is not None:
        ways.append(Parts.of_labels(order, packing.count_ranks(x, R, M, budget), M, R))
    elif per_step:
        ways.append(
            Parts.of_labels(order, *packing.pack_ranks(x, s, R, budget, config.micro_batches), R)
        )
    if not per_step or stages > 1:
        if config.micro_batch_size is None or M == 1 or per_step:
            labels, M = packing.pack(x, s, R, budget, config.micro_batches)
        else:
            labels = packing.pack_by_count(x, R, M, budget)
        if per_step:
            labels = packing.level_columns(labels, x, s, R=R * M, M=1, budget=budget)
        ways.append(_placed(order, labels, M, batch, config))
    if len(ways) == 1:
        return ways[0]
    return min(ways, key=lambda parts: time_of(batch, parts, config))


def packed_plainly(batch: Batch, config: PlanConfig, price: float) -> Iterator[Parts]:
    """Under a budget, as others have it: LPT over all micro-batches, as few as it needs; and ranks
    of equally many samples.

    price: of what is known, with what it costs to begin; what cannot take less is left out.
    """
    R, x, budget = config.dp_size, batch.x, config.micro_batch_tokens or 1
    fewest = config.micro_batches(packing.fewest_micro_batches(batch.s, R, budget))
    begin, alike = padded.begin_of(batch, config), config.slowness is None
    least, most = rank_bound(x, R) * (1 + tuning.ROUNDING), price - begin * fewest
    if alike and least >= most:
        return
    # Where no sample rules, packing levels what LPT fills, unless that needs one more.
    covered = alike and config.pipeline_stages == 1 and not packing.is_ruled(x, R, fewest)
    if not covered or least + begin < most:
        M = fewest
        while (labels := assign.lpt_budget(x, batch.s, R * M, budget)) is None:
            M = config.micro_batches(M + 1)
        yield _placed(batch.order, labels, M, batch, config)
    yield from ranks_of_equal_counts(batch, config, most)


def ranks_of_equal_counts(
    batch: Batch, config: PlanConfig, most: float = np.inf
) -> Iterator[Parts]:
    """Karmarkar-Karp over ranks of equally many samples; over the micro-batches of each, as verl
    does, or LPT, or first fit. None if a rank takes `most` then.
    """
    R, x, order, budget = config.dp_size, batch.x, batch.order, config.micro_batch_tokens or 1
    s = np.minimum(batch.tokens, budget)
    ranks = by_neighbours(batch.cost, s, R, len(x))
    of, slowness = ranks[order], 1.0 if config.slowness is None else np.array(config.slowness)
    if (np.bincount(of, x, R) * slowness).max() >= most:
        return

    def falling(sequence: IntArray, labels: IntArray) -> Parts:
        parts = Parts.of_labels(sequence, ranks[sequence] * M + labels, M, R)
        return by_falling_load(parts, matrix(batch, parts, config.layout))

    M = config.micro_batches(int(-(-np.bincount(ranks, s).max() // budget)))
    labels = assign.kk_sets(batch.cost, s, ranks, M, budget)
    if labels.min() >= 0:
        yield falling(np.arange(len(x)), labels)
    while (labels := assign.fill_sets(x, s[order], of, M, budget, tightly=False)).min() < 0:
        M = config.micro_batches(M + 1)
    yield falling(order, labels)
    own = cut(order[by_label(of, R)], np.bincount(of, minlength=R).tolist())
    yield cut_ranks(own, M, batch, config)


def split_padded(batch: Batch, config: PlanConfig, _work: Work, /) -> Parts:
    """Sorted runs, which pad least, of like cost in each micro-step."""
    n, R, budget = len(batch), config.dp_size, config.micro_batch_tokens
    if budget is None:
        order, longest, M = batch.dearest_first, batch.falling, micro_batches_for(n, config)
        most, counts = np.full(n, config.micro_batch_size or 1), padded.Counts(R, M, M)
    else:
        order, longest, most = batch.order, batch.x, padded.most_in_run(batch.s, budget)
        M = config.micro_batches(-(-max(padded.fewest_runs(batch.s, budget), 1) // R))
        last = max(min(tuning.TIMES_FEWEST * M, n // R), M)
        multiple = config.micro_batches(M + 1) - M
        begin = padded.begin_cost(longest, batch.s, budget, config.cost)
        counts = padded.Counts(R, M, last - last % multiple, multiple, begin)
    starts = padded.padded_runs(padded.Items(longest, most), counts, per_step=waits_once(config))
    assert starts is not None, "samples fit one by one"
    M = max(-(-(len(starts) - 1) // R), counts.fewest)
    return _placed(order, np.repeat(np.arange(len(starts) - 1), np.diff(starts)), M, batch, config)


def split_padded_groups(batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
    """Groups of several lengths and sizes, under a budget of samples: neighbours if they fit.

    As few micro-batches come first, and for these what shares one may have to be far apart: first
    fit.
    """
    assert batch.padded is not None, "see split_padded for samples"
    packed = split_packed(batch, config, work)
    R, M, most = config.dp_size, packed.num_micro_batches, config.micro_batch_tokens or 1
    longest, size, found = batch.padded.longest, batch.padded.size, [packed]
    by_length = np.lexsort((-size, -longest))
    items = padded.Items(longest[by_length], np.full(len(size), most), size[by_length])
    starts = padded.padded_runs(items, padded.Counts(R, M, M), per_step=waits_once(config))
    if starts is not None:
        labels = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        found.append(_placed(by_length, labels, M, batch, config))
    for order in (batch.dearest_first, by_length, np.arange(len(size))):
        fits = assign.first_fit(size[order], np.full(len(size), most))
        if assign.num_bins(fits) <= R * M:
            found.append(_placed(order, fits, M, batch, config))
    return min(found, key=lambda parts: time_of(batch, parts, config))


def waits_once(config: PlanConfig) -> bool:
    """Whether ranks meet once a step; or there is one, which waits for nobody."""
    return config.sync is Sync.STEP or config.dp_size == 1


def _placed(order: IntArray, labels: IntArray, M: int, batch: Batch, config: PlanConfig) -> Parts:
    """Micro-batches dealt to ranks. labels: the one of each item in this order."""
    R, stages = config.dp_size, config.pipeline_stages
    load = matrix(batch, Parts.of_labels(order, labels, M, R), config.layout).ravel()
    place = assign.places_of(load, R, M, config.sync is Sync.STEP, stages)
    return Parts.of_labels(order, place[labels], M, R)


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
_greedy, _kk = _shared(assign.lpt_budget), _shared(by_neighbours)


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
        self.begin = padded.begin_of(batch, config)
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


def looks_ahead(strategy: str, max_split: int = 1) -> bool:
    """Whether the strategy of this name chooses from a window; the others take the oldest.

    So does each where samples may be split: what a window is for is done by splitting then.
    """
    return strategy == Strategy.WINDOW and max_split == 1


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
