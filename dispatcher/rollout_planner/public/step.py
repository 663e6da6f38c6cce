"""One step: who trains on what, and in which micro-batch, for lengths that are all at hand.

Invariant: every index is in one micro-batch, and every rank has the same number of them, none empty
if there are samples enough. It is the dispatcher's own planner, with all samples chosen.

Steps whose ranks have equally many samples each, as some trainers need.

Invariant: every rank has n / R samples, and every micro-batch keeps to the budget, or has its fixed
size; no step is longer than with ranks by Karmarkar-Karp, as verl makes them.

With a fixed size it is the plan without that demand, or else Karmarkar-Karp's ranks, cut as verl
cuts them. Under a budget there are three ways, of which the shortest step is taken, with what it
costs to begin each micro-batch; one that is level ends the search. Ranks of nearly equal sums fill
their micro-batches by LPT, or tightly, and swap samples between these; that plan, or one with a
micro-batch more, is moved until counts are equal; or Karmarkar-Karp shares out samples over ranks
and within each, as in verl.

To move a plan, bins stay in their micro-step and go to ranks by how many samples they have, the
most to the rank with fewest. What is then missing on a rank are single samples, taken from ranks
that have too many: the cheapest of its micro-step, into whichever it lengthens least.

Example, R = 2, cost = tokens, budget 10, lengths 8 7 1 1 1 2: 8 1 1 | 7 2 1 is level and has three
on each; of 8 2 | 7 1 1 1 the last 1 would go to the first rank if the budget let it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_planner import tuning
from rollout_planner.cost import LONGEST
from rollout_planner.errors import UnequalPartitions, problems
from rollout_planner.order import as_lists, labels_of
from rollout_planner.planner import plan
from rollout_planner.public import arguments
from rollout_planner.public.partition import balanced_partition, fill_empty
from rollout_planner.split.assign import fill_sets, levelled
from rollout_planner.split.karmarkar_karp import differencing_labels
from rollout_planner.split.padded import begin_of, price_of
from rollout_planner.split.parts import Batch, Parts, by_falling_load, matrix
from rollout_planner.strategies import ranks_of_equal_counts
from rollout_planner.types import (
    CostModel,
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    Oversize,
    Plan,
    PlanConfig,
    Sync,
    Window,
    cut,
    round_up,
)


def plan_step(
    lengths: Any,
    *,
    dp_size: int,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    sync: str = Sync.MICRO_STEP,
    layout: str = Layout.PACKED,
    groups: Any = None,
    grouping: str = Grouping.RANK,
    multiple: int = 1,
    minimum: int = 1,
    cost: CostModel | str | None = None,
    pad_to: int = 1,
    oversize: str = Oversize.ERROR,
    equal_counts: bool = False,
    max_split: int = 1,
    split_overhead: float = tuning.SPLIT_OVERHEAD,
) -> list[list[list[int]]]:
    """Indices of `lengths` as `[dp rank][micro-batch][indices]`: as little waiting as can be.

    lengths: tokens of each sample (0 counts as 1): a list, an array or a tensor. Exactly one of
    micro_batch_size (samples, at most) and micro_batch_tokens (a budget) is given. sync: ranks
    wait for each other at every `micro-step` (FSDP, ZeRO-3), or once a `step`. layout: `packed`, or
    `padded` to the longest of a micro-batch. groups: one name a sample (None: in no group); samples
    of one name share what `grouping` says, a `rank` or a `micro-batch`. multiple, minimum: the
    number of micro-batches is a multiple of the one (virtual pipeline) and at least the other.
    cost: work of a length; by default quadratic. pad_to: a sample takes as many tokens as the next
    multiple of it. oversize: a sample above the budget is an `error` or goes `alone`.
    equal_counts: every rank has as many samples, as verl needs, of packed ones without groups; of a
    micro_batch_size they fill all.
    max_split: ranks that may train a micro-batch together (context parallel), of packed samples
    under a budget, without groups: 2, 4, 8 ... neighbours, the first a multiple of their number,
    which all have it at the same place. Together they have as many times the budget and the speed,
    less `split_overhead` for each doubling. A sample that is split is padded to pieces of one
    length, two a rank. Only what makes the step shorter is split, or is above the budget.

    An empty micro-batch is a filler, which is there only if there are fewer samples than
    micro-batches (or fewer groups, where each stays in one; or fewer on a rank than it has, where
    groups stay on one): its rank has to take part with something that weighs nothing. Raises
    SampleTooLong, GroupTooLong, and UnequalPartitions for a group of more samples than a
    micro-batch has, for no lengths at all, for arguments that ask for more than `MOST_FILLERS` and
    for others that cannot be (all ValueErrors).
    """
    dp_size, multiple, minimum, max_split = arguments.at_least(
        1, dp_size=dp_size, multiple=multiple, minimum=minimum, max_split=max_split
    )
    [pad_to] = arguments.at_least(1, LONGEST, pad_to=pad_to)
    if micro_batch_size is not None:
        [micro_batch_size] = arguments.at_least(1, micro_batch_size=micro_batch_size)
    if micro_batch_tokens is not None:
        micro_batch_tokens = arguments.token_budget(micro_batch_tokens=micro_batch_tokens)
    tokens = np.maximum(arguments.as_lengths(lengths), 1)
    n = len(tokens)
    if not n:
        raise UnequalPartitions("there are no lengths, so there is no step to plan")
    together = arguments.option("grouping", grouping, Grouping.RANK, Grouping.MICRO_BATCH)
    if micro_batch_size is not None:
        micro_batch_size = min(micro_batch_size, n)  # what is never full needs no room
    per_micro_step = dp_size * (micro_batch_size or 1)
    arguments.check_fillers(
        dp_size * round_up(minimum, multiple), n, "dp_size, minimum and multiple"
    )
    micro_steps = round_up(max(-(-n // per_micro_step), minimum), multiple)
    config = PlanConfig(
        dp_size=dp_size,
        dispatch_batch_size=per_micro_step * micro_steps,  # if all were full
        cost=arguments.cost_model(cost),
        micro_batch_size=micro_batch_size,
        micro_batch_tokens=micro_batch_tokens,
        sync=arguments.option("sync", sync, *Sync),
        layout=arguments.option("layout", layout, *Layout),
        grouping=Grouping.IGNORE if groups is None else together,
        micro_batch_multiple=multiple,
        min_micro_batches=minimum,
        sample_length_multiple=pad_to,
        oversize=arguments.option("oversize", oversize, Oversize.ERROR, Oversize.ALONE),
        max_split=1 << (min(max_split, dp_size).bit_length() - 1),
        split_overhead=split_overhead,
    )
    group = np.full(n, -1, dtype=np.int64) if groups is None else arguments.as_groups(groups, n)
    if equal_counts:
        _check_equal_counts(n, config)
    computed = round_up(tokens, pad_to)
    if not 0 <= split_overhead <= 1:
        raise UnequalPartitions(f"split_overhead is {split_overhead}; it must be from 0 to 1")
    costs = _checked_costs(computed, group, config)
    if not equal_counts:
        found = _planned(tokens, group, config)
        parts = found.laid_out(found.chosen.tolist())
        sizes = np.ones_like(found.counts) if found.cp_sizes is None else found.cp_sizes
        return [
            [parts[rank - rank % size][step] for step, size in enumerate(own)]
            for rank, own in enumerate(sizes.tolist())
        ]
    return with_equal_counts(Batch.of(costs, computed), config)


def _check_equal_counts(n: int, config: PlanConfig) -> None:
    """Raise UnequalPartitions where ranks cannot, or are not made to, have as many samples."""
    alone = config.grouping is Grouping.IGNORE and config.max_split == 1
    if config.layout is not Layout.PACKED or not alone:
        raise UnequalPartitions("equal_counts is for packed samples, without groups or max_split")
    size = config.micro_batch_size or 1
    if n % (config.dp_size * size):
        by = f"dp_size {config.dp_size}" + (f" x micro_batch_size {size}" if size > 1 else "")
        raise UnequalPartitions(
            f"{n} samples do not divide by {by}; pad the batch, or leave equal_counts out"
        )


def _planned(tokens: IntArray, group: IntArray, config: PlanConfig) -> Plan:
    n = len(tokens)
    window = Window(tokens, np.zeros(n, dtype=np.int64), group, np.zeros(n, dtype=np.bool_))
    return plan(window, config, take=n)


def _checked_costs(tokens: IntArray, group: IntArray, config: PlanConfig) -> FloatArray:
    """Of each sample; raises what `plan_step` does for lengths and settings that cannot be."""
    costs, budget, most = arguments.costs_of(tokens, config.cost), config.budget_of_one, 0
    together = config.grouping is Grouping.MICRO_BATCH
    if budget is not None and config.oversize is not Oversize.ALONE:
        arguments.check_fits(tokens, budget, group if together else None)
    if config.micro_batch_size is not None and together:
        most = int(np.bincount(group).max())
    if most > (config.micro_batch_size or 0):
        raise UnequalPartitions(
            f"a group has {most} samples and micro_batch_size is {config.micro_batch_size}; raise "
            "it to the size of a group, or pass grouping='rank'"
        )
    if wrong := next(problems(config), None):
        raise UnequalPartitions(wrong)
    return costs


def with_equal_counts(batch: Batch, config: PlanConfig) -> list[list[list[int]]]:
    """Indices as [dp rank][micro-batch]; the batch is a multiple of the ranks.

    Raises UnequalPartitions if a rank has fewer samples than micro-batches and some cannot be
    fillers.
    """
    R, x, task = config.dp_size, batch.cost, _Task(batch, config)
    fewest = config.micro_batches(-(-int(batch.tokens.sum()) // (R * task.budget)))
    enough = (1 + tuning.LEVEL) * float(x.sum()) / R + task.begin * fewest
    ways: list[Callable[[], Parts | None]] = [task.moved, task.by_lpt, task.by_differences]
    if config.micro_batch_size is not None:
        ways, enough = [lambda: task.planned(1), task.in_runs], 0.0
    elif config.sync is Sync.STEP:  # sums are all that counts, and these ranks have nothing else
        ways[:2] = ways[1::-1]
    best, least = None, np.inf
    for way in ways:
        found = way()
        if found is not None and task.time(found) < least:
            best, least = found, task.time(found)
        if least <= enough:
            break
    if best is None:
        raise UnequalPartitions(
            f"{task.each} samples of a rank cannot fill {fewest} micro-batches; lower "
            "minimum or multiple, or leave equal_counts out"
        )
    M = best.num_micro_batches
    return cut(as_lists(best.labels(), R * M), [M] * R)


class _Task:
    """Ways to such a step, or None."""

    def __init__(self, batch: Batch, config: PlanConfig) -> None:
        self.batch, self.config, self.x = batch, config, batch.cost
        self.R, self.budget = config.dp_size, config.micro_batch_tokens or 1
        self.tokens = np.minimum(batch.tokens, self.budget)  # what is longer goes alone
        self.each, self.begin = len(batch) // self.R, begin_of(batch, config)

    def time(self, parts: Parts) -> float:
        """What it takes, with what it costs to begin each micro-batch."""
        return price_of(self.batch, parts, self.config)

    def placed(self, rank_of: IntArray, step_of: IntArray, *, falling: bool = False) -> Parts:
        """From the rank and the micro-batch of each sample; falling: these by falling cost.

        The last ones are empty where a rank has fewer samples than there are micro-batches.
        """
        M = self.config.micro_batches(int(step_of.max()) + 1)
        parts = Parts.of_labels(np.arange(len(self.x)), rank_of * M + step_of, M, self.R)
        load = matrix(self.batch, parts, Layout.PACKED)
        return by_falling_load(parts, load) if falling else parts

    def planned(self, least: int) -> Parts:
        """The plan without the demand, of so many micro-batches at least."""
        least = max(least, self.config.min_micro_batches)
        config = replace(self.config, min_micro_batches=least)
        found = _planned(self.batch.tokens, np.full(len(self.x), -1), config)
        return Parts(found.chosen, found.counts)

    def in_runs(self) -> Parts:
        """Karmarkar-Karp's ranks in micro-batches of one size, the cheap ones at both ends."""
        rank_of = differencing_labels(self.x, self.R, equal_size=True)
        rising = np.lexsort((self.x, rank_of)).reshape(self.R, -1)
        ends = np.hstack((rising[:, ::2], rising[:, 1::2][:, ::-1]))
        step_of = np.empty_like(rank_of)
        step_of[ends] = np.arange(self.each) // (self.config.micro_batch_size or 1)
        return self.placed(rank_of, step_of)

    def by_differences(self) -> Parts | None:
        """Karmarkar-Karp over ranks, and in each as verl has it, by LPT or by first fit."""
        ways = ranks_of_equal_counts(self.batch, self.config)
        return min((each for each in ways if each.counts.all()), key=self.time, default=None)

    def by_lpt(self) -> Parts | None:
        """Ranks of nearly equal sums, filled by LPT, after swaps between micro-batches of each."""
        ranks = labels_of(balanced_partition(self.x, self.R, equal_size=True), len(self.x))
        parts = self._filled(ranks)
        if parts is None:
            return None
        M = parts.num_micro_batches
        found = levelled(
            parts.labels(), self.x, self.R * M, self.tokens, self.budget,
            rows=self.R, enough=tuning.LEVEL,
        )  # fmt: skip
        return self.placed(ranks, found % M, falling=True)

    def _filled(self, rank_of: IntArray) -> Parts | None:
        """As many micro-batches as the rank that needs most, if ranks have so many samples."""
        M = int(-(-np.bincount(rank_of, self.tokens).max() // self.budget))
        order, step_of = np.lexsort((-self.x, rank_of)), np.empty_like(rank_of)
        while (M := self.config.micro_batches(M)) <= self.each:
            step_of[order] = fill_sets(
                self.x[order], self.tokens[order], rank_of[order], M, self.budget
            )
            if step_of.min() >= 0:
                for own in order.reshape(self.R, -1):
                    step_of[own] = fill_empty(step_of[own], M)
                return self.placed(rank_of, step_of, falling=True)
            M += 1
        return None

    def moved(self) -> Parts | None:
        """The plan, or one of a micro-batch more, which may have room where that has too little."""
        free = self.planned(1)
        found, M = self._moved(free), free.num_micro_batches + 1
        if found is None or self.time(found) > self.time(free) + self.begin:
            more = self._moved(self.planned(M)) if self.each >= M else None
            if found is None or (more is not None and self.time(more) < self.time(found)):
                return more
        return found

    def _moved(self, free: Parts) -> Parts | None:
        """As many samples on each rank; None if no micro-batch has room for one more."""
        (R, M), size, held = free.counts.shape, free.counts, np.zeros(self.R)
        rank_of, step_of = np.divmod(free.labels(), M)
        to = np.empty(size.shape, dtype=np.int64)
        for at in np.argsort(-np.ptp(size, axis=0), kind="stable"):
            fullest = np.argsort(-size[:, at], kind="stable")
            to[fullest, at] = fewest = np.argsort(held, kind="stable")
            held[fewest] += size[fullest, at]
        rank_of = to[rank_of, step_of]
        lacks, rising = self.each - held, np.argsort(self.x, kind="stable")
        size, load, full = (
            np.bincount(rank_of * M + step_of, of, R * M).reshape(R, M)
            for of in (None, self.x, self.tokens)
        )
        while lacks.any():
            rank, step, taking = rank_of[rising], step_of[rising], np.flatnonzero(lacks > 0)
            gives = rising[(lacks[rank] < 0) & (size[rank, step] > 1)]
            steps, first = np.unique(step_of[gives], return_index=True)
            cheapest = gives[first]  # of each micro-step
            after = load[taking][:, steps] + self.x[cheapest]
            after[full[taking][:, steps] + self.tokens[cheapest] > self.budget] = np.inf
            longer = np.maximum(after.min(axis=0) - load.max(axis=0)[steps], 0.0)
            if not np.isfinite(longer).any():
                return None
            best = int(np.lexsort((self.x[cheapest], longer))[0])
            sample, taker = int(cheapest[best]), int(taking[after[:, best].argmin()])
            for where, sign in ((int(rank_of[sample]), -1), (taker, 1)):
                lacks[where] -= sign
                size[where, steps[best]] += sign
                load[where, steps[best]] += sign * self.x[sample]
                full[where, steps[best]] += sign * self.tokens[sample]
            rank_of[sample] = taker
        return self.placed(rank_of, step_of)
