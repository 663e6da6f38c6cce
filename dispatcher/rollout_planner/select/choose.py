"""Choosing the samples of a step: what is due, whole groups where asked, then the best selection.

Invariant: exactly `take` positions (with groups, the largest total that whole groups reach),
and the same ones for the same window and config.
"""

from dataclasses import dataclass, replace

import numpy as np

from rollout_planner import tuning
from rollout_planner.bounds import rank_bound
from rollout_planner.errors import PlanError
from rollout_planner.objective import estimate, ruling_cost
from rollout_planner.select.groups import fill_exactly, group_index, group_max
from rollout_planner.select.lane import Pool, keep_oldest
from rollout_planner.select.loss_bound import LossBound
from rollout_planner.select.selection import Judge, Selection, due, select
from rollout_planner.split.group_items import config_of_items, cost_of_groups
from rollout_planner.types import (
    BoolArray,
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    PlanConfig,
    Sync,
    Window,
)


def choose(
    window: Window,
    cost: FloatArray,
    config: PlanConfig,
    take: int,
    *,
    by_cost: IntArray,
    ahead: bool,
) -> list[Selection]:
    """What this step may take, as masks, the most promising first; the oldest are among them.

    by_cost: positions by falling tokens. Nothing but the oldest unless `ahead`.
    """
    if take >= len(window):
        return [Selection(np.ones(len(window), dtype=bool))]
    left = _skips_left(window, cost, config, take)
    if config.grouping is not Grouping.IGNORE and (window.group >= 0).any():
        return _choose_groups(window, cost, left, config, take, by_cost=by_cost, ahead=ahead)
    forced = due(left, window.must_go, take)
    if not ahead:
        return [Selection(keep_oldest(forced, take))]
    bound = LossBound.of(window, config, take)
    if bound is not None:
        forced = bound.due(left, forced, take)
    pool = Pool(
        cost=cost,
        order=by_cost,
        age=_age(window.skips, left),
        forced=forced,
        neighbours=_neighbours(config),
        columns=_waits_in_columns(config),
        band=_band(config),
        share=ruling_cost(cost, window.tokens, take, config),
        per_step=config.sync is Sync.STEP,
    )
    return select(pool, take, _judge(window, cost, by_cost, config), bound)


def must_take(window: Window, cost: FloatArray, config: PlanConfig, take: int) -> int:
    """How many of `take` samples, or groups, go now if none is to be passed over too often.

    Later steps take as many at most, so it may be more than those that are due in this one.
    """
    left = _skips_left(window, cost, config, take)
    if config.grouping is Grouping.IGNORE or not (window.group >= 0).any():
        return int(np.count_nonzero(due(left, window.must_go, take)))
    groups = _Groups.of(window, left, config)
    return int(groups.size[groups.due(take)].sum())


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups as what is chosen. index: int64[n], of each sample; size: what each counts as."""

    index: IntArray
    size: IntArray
    left: IntArray
    must_go: BoolArray

    @classmethod
    def of(cls, window: Window, left: IntArray, config: PlanConfig) -> "_Groups":
        """left: skips that each sample may still suffer; a group has its most urgent one's."""
        index = group_index(window.group)
        must_go = group_max(window.must_go.astype(np.int64), index) > 0
        size = np.bincount(index)
        if config.by_groups:
            size = np.ones_like(size)
        return cls(index, size, -group_max(-left, index), must_go)

    def due(self, take: int) -> BoolArray:
        """Those that have to go now."""
        return due(self.left, self.must_go, _surely_taken(self.size, take), self.size)


def _choose_groups(
    window: Window,
    cost: FloatArray,
    left: IntArray,
    config: PlanConfig,
    take: int,
    *,
    by_cost: IntArray,
    ahead: bool,
) -> list[Selection]:
    """Whole groups; selection sees a group as one item that costs what its dearest sample does.

    Where a step takes a number of groups, each is of size one, whatever its members.
    """
    groups = _Groups.of(window, left, config)
    index, size = groups.index, groups.size
    members, samples = int(np.median(np.bincount(index))), float(take)
    if config.by_groups:
        samples = take * len(window) / len(size)
    if size.min() > take:
        raise PlanError(
            f"the smallest group has {size.min()} samples and the step takes {take}; "
            "raise --dispatch-batch-size to the size of a group at least"
        )
    forced = groups.due(take)
    urgency = np.argsort(np.where(groups.must_go, -1, groups.left), kind="stable")

    def realise(first: BoolArray) -> BoolArray:
        order = np.concatenate((urgency[forced[urgency]], np.argsort(~first, kind="stable")))
        order = order[np.sort(np.unique(order, return_index=True)[1])]
        chosen: BoolArray = fill_exactly(order, forced, size, take)
        return chosen

    plain = realise(np.ones(len(size), dtype=bool))
    if not ahead:
        return [Selection(plain[index])]
    # What rules a rank or a micro-step: a sample, or a group where it stays in one piece there.
    together = config.grouping is not Grouping.STEP
    bound = LossBound.of(window, config, samples, index)
    if bound is not None:
        forced = bound.due(groups.left, forced, int(np.count_nonzero(plain)))
    item = cost_of_groups(cost, index, config) if together else group_max(cost, index)
    pool = Pool(
        cost=item,
        order=np.argsort(-item, kind="stable"),
        age=_age(group_max(window.skips, index), groups.left),
        forced=forced,
        neighbours=max(_neighbours(config) // members, config.dp_size if together else 1),
        columns=_waits_in_columns(config),
        band=_band(config),
        share=ruling_cost(cost, window.tokens, samples, config),
        per_step=config.sync is Sync.STEP,
    )
    by_sample = _judge(window, cost, by_cost, config)
    judge = _judge_of_groups(window, cost, index, config, by_sample)
    count = int(np.count_nonzero(plain))
    found = select(pool, count, lambda keep, lost: judge(realise(keep), lost), bound)
    return [replace(each, keep=realise(each.keep)[index]) for each in found]


def _judge_of_groups(
    window: Window, cost: FloatArray, index: IntArray, config: PlanConfig, by_sample: Judge
) -> Judge:
    """As `_judge`, of whole groups, whose masks are over groups; index: group of each sample."""
    if config.grouping is Grouping.STEP:
        return lambda keep, lost: by_sample(keep[index], lost)
    load = cost_of_groups(cost, index, config)
    mean = float(load.sum()) / len(cost)
    size = np.bincount(index)
    own, tokens = config, size
    if config.grouping is Grouping.MICRO_BATCH:
        own = config_of_items(size, config)
        if config.micro_batch_tokens is not None:
            tokens = np.bincount(index, weights=window.tokens).astype(np.int64)
    order = np.argsort(-load, kind="stable")
    if own.micro_batch_tokens is not None:
        tokens = np.minimum(tokens, own.micro_batch_tokens)  # as none is the first that is above it

    def judge(keep: BoolArray, lost: float) -> float:
        kept = order[keep[order]]
        x, work = load[kept], mean * float(size[kept].sum())
        if config.grouping is Grouping.MICRO_BATCH:
            time = estimate(x, tokens[kept], own)
        else:
            time = rank_bound(-np.sort(-x), config.dp_size)
        excess = (time * config.dp_size - float(x.sum())) / work if work > 0 else 0.0
        if config.grouping is Grouping.RANK:
            return max(excess, by_sample(keep[index], lost))
        return excess

    return judge


def _surely_taken(size: IntArray, take: int) -> int:
    """Samples that every later step takes at least, as whole groups may not fill it."""
    if np.ptp(size):
        return max(take - int(size.max()) + 1, 1)
    return max(take - take % int(size[0]), 1)


def _judge(window: Window, cost: FloatArray, by_cost: IntArray, config: PlanConfig) -> Judge:
    """Waiting that a good split of what a mask keeps will have, over the work of a mean batch.

    Not over the batch's own work: taking the dear samples early would seem to wait less, and it
    is the sum over all steps that counts.
    """
    mean = float(np.add.reduce(cost)) / len(cost)
    costs, tokens = cost[by_cost], window.tokens[by_cost]

    def judge(keep: BoolArray, lost: float) -> float:
        kept = keep.take(by_cost).nonzero()[0]
        x = costs.take(kept)
        work, own = mean * len(kept), float(np.add.reduce(x))
        if x.item(0) * config.dp_size - own >= lost * work:
            return lost  # its largest rules all ranks, and they wait too long for that alone
        time = estimate(x, tokens.take(kept), config)
        return (time * config.dp_size - own) / work if work > 0 else 0.0

    return judge


def _waits_in_columns(config: PlanConfig) -> bool:
    """Micro-steps of a fixed size: what waits is the difference between neighbours in length."""
    return config.micro_batch_size is not None and config.sync is Sync.MICRO_STEP


def _band(config: PlanConfig) -> float:
    if config.layout is Layout.PADDED:
        return tuning.BAND_OF_PADDED
    return tuning.BAND_OF_COLUMNS if _waits_in_columns(config) else tuning.BAND


def _neighbours(config: PlanConfig) -> int:
    """Samples that should be alike: those that start a micro-step, or all of a padded one."""
    m = config.micro_batch_size or tuning.ALIKE_IN_BUDGET
    return config.dp_size * (m if config.layout is Layout.PADDED else 1)


def _skips_left(window: Window, cost: FloatArray, config: PlanConfig, take: int) -> IntArray:
    """Dispatches that may still pass each sample over; outliers may have a bound of their own."""
    if config.outlier_max_skips is None:
        return config.max_skips - window.skips
    batch: float = config.dispatch_batch_size
    if config.by_groups:
        batch = take * len(window) / len(np.unique(group_index(window.group)))
    rank_share = cost.mean() * batch / config.dp_size
    bound = np.where(cost > rank_share, config.outlier_max_skips, config.max_skips)
    return bound - window.skips


def _age(skips: IntArray | FloatArray, left: IntArray | FloatArray) -> FloatArray:
    """Skips suffered as a share of the bound; 1 for what has no skip left."""
    age: FloatArray = np.where(left > 0, skips / np.maximum(skips + left, 1), 1.0)
    return age
