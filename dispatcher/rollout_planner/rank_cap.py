"""A cap on the tokens that one rank has in a step, as what it stores grows with them.

Invariant: what is given back is a split by the config's strategy, its micro-batches on other ranks
at the most.

Ranks of equal work differ in tokens where work grows faster than these: a rank of short samples has
more. Where the split of least waiting is above the cap, its micro-batches are dealt anew, each in
its own micro-step, which costs nothing where ranks meet at every one of them; then tokens count as
work too, more and more, until ranks have about equally many of them. A sample, or a group that
stays on one rank, may exceed the cap by itself: no smaller step would help it, so that a rank which
has nothing besides is within.

Example, R = 2, cost s * s, samples of 4 2 2 2 2: 4 | 2 2 2 2 is level, with 4 and 8 tokens. Under
a cap of 6 it is 4 2 | 2 2 2; with a 9 instead of the 4 it is 9 | 2 2 2, and the last 2 goes later.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rollout_planner import tuning
from rollout_planner.select.groups import group_index
from rollout_planner.split.leveling import spread_columns
from rollout_planner.split.micro_batch_order import rearranged, tokens_of
from rollout_planner.split.parts import Batch, Parts
from rollout_planner.strategies import split
from rollout_planner.types import Grouping, IntArray, PlanConfig, Window


def split_under_cap(batch: Batch, plain: Parts, config: PlanConfig) -> tuple[Parts, bool]:
    """The first split that keeps the cap, and True; else the one nearest to it.

    plain: the split of least waiting.
    """
    if config.rank_tokens is None:
        return plain, True
    candidates = _candidates(batch, plain, config)
    best, least = plain, _most(batch, plain, config)
    while least > config.rank_tokens:
        parts = next(candidates, None)
        if parts is None:
            return best, False
        most = _most(batch, parts, config)
        if most < least:
            best, least = parts, most
    return best, True


def _most(batch: Batch, parts: Parts, config: PlanConfig) -> float:
    """Tokens of the rank that has most, of those that have more than one sample or group."""
    held = tokens_of(batch, parts, config).sum(axis=1)
    return float(held[_units(batch, parts) > 1].max(initial=0.0))


def _units(batch: Batch, parts: Parts) -> IntArray:
    """How many samples each rank has, or groups where these stay on one, int64[R]."""
    sizes: IntArray = parts.counts.sum(axis=1)
    if batch.group is None:
        return sizes
    rank_of = np.empty(int(batch.group.max()) + 1, dtype=np.int64)
    rank_of[batch.group[parts.sequence]] = np.repeat(np.arange(len(sizes)), sizes)
    units: IntArray = np.bincount(rank_of, minlength=len(sizes))
    return units


def _candidates(batch: Batch, plain: Parts, config: PlanConfig) -> Iterator[Parts]:
    """By rising price in waiting."""
    yield from _dealt_anew(batch, plain, config)
    dear = float(batch.cost.mean())
    for weight in tuning.TOKEN_WEIGHTS if dear > 0 else tuning.TOKEN_WEIGHTS[-1:]:
        work = batch.tokens.astype(np.float64)
        if weight < np.inf:
            work = batch.cost / dear + weight * work / work.mean()
        parts = split(replace(batch, cost=work), config)
        yield parts
        yield from _dealt_anew(batch, parts, config)


def _dealt_anew(batch: Batch, parts: Parts, config: PlanConfig) -> Iterator[Parts]:
    """Each micro-step's micro-batches dealt to ranks by tokens, unless groups tie them to one."""
    if batch.group is not None:
        return
    R, M = parts.counts.shape
    rank_of = spread_columns(tokens_of(batch, parts, config).T)
    source = np.empty((R, M), dtype=np.int64)
    source[rank_of, np.arange(M)[:, None]] = np.arange(R * M).reshape(R, M).T
    yield rearranged(parts, source)


def smallest_step(window: Window, config: PlanConfig) -> int:
    """What a step takes at least: a sample, or a group where these stay whole."""
    if config.by_groups or config.grouping is Grouping.IGNORE:
        return 1
    return int(np.bincount(group_index(window.group)).min())


def fits_on_ranks(window: Window, config: PlanConfig, take: int) -> int:
    """How many of a window's samples, or groups, a step has room for if they are of mean length.

    As many as there are ranks at least: each may go to one of its own.
    """
    per_group = 1.0
    if config.by_groups or config.grouping in (Grouping.RANK, Grouping.MICRO_BATCH):
        per_group = len(window) / (int(group_index(window.group).max()) + 1)
    samples = take * per_group if config.by_groups else float(take)
    tokens = _within_cap(window.tokens, config)
    room = max((config.rank_tokens or 1) / float(tokens.mean()), per_group) * config.dp_size
    return take if samples <= room else _full(int(take * room / samples), config)


def fewer(take: int, tokens: IntArray, config: PlanConfig) -> int:
    """What to try next if `take` samples, or groups, of these tokens were too much."""
    held = int(_within_cap(tokens, config).sum())
    room = (config.rank_tokens or 1) * config.dp_size / max(held, 1)
    less = max(1, take // tuning.CAP_STEPS_DOWN)
    return _full(min(int(take * room), take - less), config)


def _within_cap(tokens: IntArray, config: PlanConfig) -> IntArray:
    """What samples take of the cap: one that exceeds it takes a rank, whatever it has."""
    return np.minimum(tokens, config.rank_tokens or 1)


def _full(take: int, config: PlanConfig) -> int:
    """So many, or a few fewer that leave no micro-batch half empty; at least one."""
    unit = config.dp_size * (config.micro_batch_size or 1) * config.micro_batch_multiple
    if config.micro_batch_size is None or config.by_groups or take < unit:
        return max(take, 1)
    return take - take % unit
