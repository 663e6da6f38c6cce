"""The door to planning: a window and a config in, a plan out.

Invariant: a plan depends on nothing but its arguments. It takes every sample at most once and
takes exactly what was asked for; all ranks get the same number of micro-batches.

A rank may have a cap on its tokens, as what it stores grows with them. Ranks of equal work differ
in tokens where work grows faster than these: a rank of short samples has more. Where the split of
least waiting is above the cap, its micro-batches are dealt anew, each in its own micro-step, which
costs nothing where ranks meet at every one of them; then tokens count as work too, more and more,
until ranks have about equally many of them; then fewer samples are taken. A sample, or a group that
stays on one rank, may exceed the cap by itself: no smaller step would help it, so that a rank which
has nothing besides is within.

Example, R = 2, cost s * s, samples of 4 2 2 2 2: 4 | 2 2 2 2 is level, with 4 and 8 tokens. Under
a cap of 6 it is 4 2 | 2 2 2; with a 9 instead of the 4 it is 9 | 2 2 2, and the last 2 goes later.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from rollout_planner import tuning
from rollout_planner.cost import DEAREST
from rollout_planner.errors import PlanError, validate_config
from rollout_planner.objective import bound_of
from rollout_planner.order import among, by_falling_tokens, group_index
from rollout_planner.public.arguments import check_fits
from rollout_planner.selection import choose, must_take
from rollout_planner.split.assign import spread_columns
from rollout_planner.split.blocks import with_blocks
from rollout_planner.split.parts import (
    Batch,
    Parts,
    in_order,
    rearranged,
    time_of,
    times,
    tokens_of,
)
from rollout_planner.strategies import looks_ahead, plain_split, split
from rollout_planner.types import (
    FloatArray,
    Grouping,
    IntArray,
    Oversize,
    Plan,
    PlanConfig,
    Window,
    bubble,
    digest_of,
    imbalance,
    round_up,
    straggler_excess,
)

__all__ = ["plan", "plan_digest", "validate_config"]


def plan(
    window: Window, config: PlanConfig, take: int | None = None, *, whole: bool = False
) -> Plan:
    """Choose `take` samples (default: a dispatch batch, or all if fewer) and split them.

    Fewer are chosen where ranks would have more than `rank_tokens`, but for one that has a single
    sample or group, and as long as nobody is passed over more than `max_skips` times for it;
    `whole`: all are, whatever ranks have then.
    Raises SampleTooLong or GroupTooLong for a sample above the token budget, or a group that has to
    stay in one micro-batch, unless such go alone; and PlanError for a window whose columns disagree
    or that no group fits, and for a group of more samples than a micro-batch has.
    """
    if (multiple := config.sample_length_multiple) > 1:  # what ranks compute
        window = replace(window, tokens=round_up(window.tokens, multiple))
    cost = _checked_cost(window, config)
    take = min(len(window), config.dispatch_batch_size if take is None else take)
    if take < 1:
        raise PlanError(f"{take} samples to plan from a window of {len(window)}; wait for more")
    if config.max_split > 1:  # what has no room on one rank has on several
        config = replace(config, oversize=Oversize.ALONE, slowness=None)
    chosen, batch, parts = _choose_and_split(window, cost, config, take, whole=whole)
    parts = in_order(batch, parts, config)
    plain = times(batch, plain_split(batch, config), config)
    found = Plan(
        chosen=chosen[parts.sequence],
        counts=parts.counts,
        cost=times(batch, parts, config),
        sync=config.sync,
        fifo_imbalance=imbalance(plain),
        fifo_excess=straggler_excess(plain, config.sync, config.pipeline_stages),
        lower_bound=bound_of(batch, parts.num_micro_batches, config),
        pipeline_stages=config.pipeline_stages,
        slowness=config.slowness,
    )
    return with_blocks(found, window.tokens, config) if config.max_split > 1 else found


class _Choice(NamedTuple):
    """Ascending positions of the samples, these as a batch, and its parts."""

    chosen: IntArray
    batch: Batch
    parts: Parts


def _choose_and_split(
    window: Window, cost: FloatArray, config: PlanConfig, take: int, *, whole: bool
) -> _Choice:
    """Fewer samples until no rank is above its cap, or all that are left have to go."""
    if whole or config.rank_tokens is None:
        return _compare(window, cost, config, take)
    least = must_take(window, cost, config, take)
    if config.grouping is not Grouping.IGNORE and not config.by_groups:
        least = max(least, int(np.bincount(group_index(window.group)).min()))
    least = max(least, 1)
    while True:
        choice = _compare(window, cost, config, take)
        parts, kept = _split_under_cap(choice.batch, choice.parts, config, config.rank_tokens)
        if kept or take <= least:
            return choice._replace(parts=parts)
        held = int(np.minimum(choice.batch.tokens, config.rank_tokens).sum())
        room = config.rank_tokens * config.dp_size / max(held, 1)
        less = take - max(1, take // tuning.CAP_STEPS_DOWN)
        take = max(_full(min(int(take * room), less), config), least)


def _full(take: int, config: PlanConfig) -> int:
    """So many, or a few fewer that leave no micro-batch half empty; at least one."""
    unit = config.dp_size * (config.micro_batch_size or 1) * config.micro_batch_multiple
    if config.micro_batch_size is None or config.by_groups or take < unit:
        return max(take, 1)
    return take - take % unit


def _split_under_cap(
    batch: Batch, plain: Parts, config: PlanConfig, cap: int
) -> tuple[Parts, bool]:
    """The first split that keeps the cap, and True; else the one nearest to it.

    plain: the split of least waiting.
    """
    best, least = plain, np.inf
    for parts in _by_rising_wait(batch, plain, config):
        held = tokens_of(batch, parts, config).sum(axis=1)
        most = float(held[_units(batch, parts) > 1].max(initial=0.0))
        if most < least:
            best, least = parts, most
        if least <= cap:
            return best, True
    return best, False


def _units(batch: Batch, parts: Parts) -> IntArray:
    """How many samples each rank has, or groups where these stay on one, int64[R]."""
    rank_of = parts.labels() // parts.num_micro_batches
    if batch.group is not None:
        rank_of = rank_of[np.unique(batch.group, return_index=True)[1]]
    return np.bincount(rank_of, minlength=len(parts.counts))


def _by_rising_wait(batch: Batch, parts: Parts, config: PlanConfig) -> Iterator[Parts]:
    """Splits with less and less for the rank of most tokens, each dealt anew as well.

    Dealt by tokens in each micro-step, unless groups tie micro-batches to a rank.
    """
    mean = float(batch.cost.mean())
    for weight in (0.0, *(tuning.TOKEN_WEIGHTS if mean > 0 else tuning.TOKEN_WEIGHTS[-1:])):
        if weight:
            work = batch.tokens.astype(np.float64)
            if weight < np.inf:
                work = batch.cost / mean + weight * work / work.mean()
            parts = split(replace(batch, cost=work), config)
        yield parts
        if batch.group is None:
            R, M = parts.counts.shape
            rank_of = spread_columns(tokens_of(batch, parts, config).T)
            source = np.empty((R, M), dtype=np.int64)
            source[rank_of, np.arange(M)[:, None]] = np.arange(R * M).reshape(R, M).T
            yield rearranged(parts, source)


def _compare(window: Window, cost: FloatArray, config: PlanConfig, take: int) -> _Choice:
    """The selection that waits least once it is split.

    Selections come by rising estimated waiting. In steps that are not too large, the next ones are
    split as well while the best so far waits longer than estimated.
    """
    looks = looks_ahead(config.strategy, config.max_split)
    ahead, best, least, estimated = looks, None, np.inf, np.inf
    mean, by_cost = float(np.add.reduce(cost)) / len(cost), by_falling_tokens(window.tokens)
    most = tuning.SELECTIONS if take <= tuning.COMPARED_UP_TO else 1
    selections = choose(window, cost, config, take, by_cost=by_cost, ahead=ahead)
    for selection in islice(selections, most):
        estimated = min(estimated, selection.total)
        if best and (selection.total >= least or least <= estimated + config.compared_above):
            break
        chosen = selection.keep.nonzero()[0]
        group = _groups(window.group, chosen, config)
        batch = Batch(cost[chosen], window.tokens[chosen], group, among(by_cost, selection.keep))
        choice = _Choice(chosen, batch, split(batch, config))
        even = bubble(config.pipeline_stages, choice.parts.num_micro_batches)
        time = time_of(batch, choice.parts, config) / even
        waiting = time * config.capacity - float(np.add.reduce(batch.cost))
        waits = waiting / max(mean * len(chosen), np.finfo(float).tiny) + selection.later
        if best is None or waits < least:
            best, least = choice, waits
    assert best is not None, "there is a selection"
    return best


def plan_digest(plan: Plan) -> str:
    """Fingerprint of who trains on what and when: equal for equal micro-batches, 32 hex digits."""
    cp_sizes = [] if plan.cp_sizes is None else plan.cp_sizes.tolist()
    return digest_of(0, plan.counts.tolist(), plan.chosen.tolist(), cp_sizes=cp_sizes)


def _groups(group: IntArray, chosen: IntArray, config: PlanConfig) -> IntArray | None:
    """Dense group numbers where groups matter to the split, and one has two samples."""
    if config.grouping in (Grouping.IGNORE, Grouping.STEP) or not (group[chosen] >= 0).any():
        return None
    index = group_index(group[chosen])
    return None if int(index.max()) + 1 == len(index) else index


def _checked_cost(window: Window, config: PlanConfig) -> FloatArray:
    n = len(window)
    if not (len(window.skips) == len(window.group) == len(window.must_go) == n):
        raise PlanError("the window's columns differ in length; pass one row per sample")
    budget = config.budget_of_one
    if budget is not None and config.oversize is not Oversize.ALONE:
        together = config.grouping is Grouping.MICRO_BATCH
        group = group_index(window.group) if together else None
        check_fits(window.tokens, budget, group, numbered=False)
    cost = np.asarray(config.cost(window.tokens), dtype=np.float64)
    if cost.shape != (n,):
        raise PlanError(f"the cost model gave {cost.shape} costs for {n} samples; check it")
    cheapest, dearest = np.minimum.reduce(cost, initial=0), np.maximum.reduce(cost, initial=0)
    if not (cheapest >= 0 and dearest <= DEAREST):
        raise PlanError(
            f"the cost model gave a cost that is negative, no number or above {DEAREST:g}; check it"
        )
    return cost
