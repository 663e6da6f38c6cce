"""Choosing the samples of a step: what is due, whole groups where asked, then the best selection.

Invariant: exactly `take` positions (with groups, the largest total that whole groups reach),
and the same ones for the same window and config.
"""

from dataclasses import dataclass, replace

import numpy as np

from rollout_planner import tuning
from rollout_planner.errors import PlanError
from rollout_planner.objective import estimate, rank_bound
from rollout_planner.select.candidates import (
    Judge,
    LossBound,
    Pool,
    Selection,
    due,
    keep_oldest,
    select,
)
from rollout_planner.split.group_items import (
    config_of_items,
    cost_of_groups,
    fill_exactly,
    group_index,
    group_max,
)
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
    items = _Items.of(window, cost, config, take)
    if items.size.min() > take:
        raise PlanError(
            f"the smallest group has {items.size.min()} samples and the step takes {take}; "
            "raise --dispatch-batch-size to the size of a group at least"
        )
    forced = items.due(take)

    def realise(first: BoolArray) -> BoolArray:
        return items.filled(first, forced, take)

    oldest = realise(np.ones(len(forced), dtype=bool))
    if not ahead:
        return [Selection(oldest[items.index])]
    bound = LossBound.of(window, config, items.samples, items.index)
    count = int(np.count_nonzero(oldest))
    if bound is not None:
        forced = bound.due(items.left, forced, count)
    together = items.grouped and config.grouping is not Grouping.STEP
    # What rules a rank or a micro-step: a sample, or a group where it stays in one piece there.
    load = cost_of_groups(cost, items.index, config) if together else group_max(cost, items.index)
    members = int(np.median(np.bincount(items.index)))
    pool = Pool(
        cost=load,
        order=by_cost if not items.grouped else np.argsort(-load, kind="stable"),
        age=np.where(items.left > 0, items.skips / np.maximum(items.skips + items.left, 1), 1.0),
        forced=forced,
        neighbours=max(_neighbours(config) // members, config.dp_size if together else 1),
        columns=config.micro_batch_size is not None and config.sync is Sync.MICRO_STEP,
        share=items.share,
    )
    judge = _judge(window, cost, by_cost, items, config)
    found = select(pool, count, lambda keep: judge(realise(keep)), bound)
    return [replace(each, keep=realise(each.keep)[items.index]) for each in found]


def must_take(window: Window, cost: FloatArray, config: PlanConfig, take: int) -> int:
    """How many of `take` samples, or groups, go now if none is to be passed over too often.

    Later steps take as many at most, so it may be more than those that are due in this one.
    """
    items = _Items.of(window, cost, config, take)
    return int(items.size[items.due(take)].sum())


@dataclass(frozen=True, slots=True)
class _Items:
    """What is chosen: groups that stay whole, or each sample as one.

    index: int64[n], item of each sample. size: what each counts as. left: skips that each may still
    suffer: those of a group's most urgent sample. samples: of the step; share: what a rank has of
    these.
    """

    grouped: bool
    index: IntArray
    size: IntArray
    skips: IntArray
    left: IntArray
    must_go: BoolArray
    samples: float
    share: float

    @classmethod
    def of(cls, window: Window, cost: FloatArray, config: PlanConfig, take: int) -> "_Items":
        """Of a step that takes so many samples, or groups, each of size one."""
        grouped = config.grouping is not Grouping.IGNORE and bool((window.group >= 0).any())
        index = group_index(window.group) if grouped else np.arange(len(window))
        size, samples = np.bincount(index), float(take)
        if grouped and config.by_groups:
            size, samples = np.ones_like(size), take * len(window) / len(size)
        share = float(cost.mean()) * samples / config.dp_size
        bound = np.full(len(window), config.max_skips)
        if config.outlier_max_skips is not None:
            bound[cost > share] = config.outlier_max_skips
        return cls(
            grouped, index, size, group_max(window.skips, index),
            -group_max(window.skips - bound, index),
            group_max(window.must_go.astype(np.int64), index) > 0, samples, share,
        )  # fmt: skip

    def due(self, take: int) -> BoolArray:
        """Those that have to go now, as every later step takes so many samples at least."""
        most = int(self.size.max())
        surely = take - most + 1 if np.ptp(self.size) else take - take % most
        return due(self.left, self.must_go, max(surely, 1), self.size)

    def filled(self, first: BoolArray, forced: BoolArray, take: int) -> BoolArray:
        """Those that are forced, then the `first`, the oldest before others, as far as they fit."""
        if self.size.max() == 1:
            return keep_oldest(forced, take, np.flatnonzero(first))
        urgency = np.lexsort((self.left, ~forced))[: np.count_nonzero(forced)]
        others = np.argsort(~first, kind="stable")
        order = np.concatenate((urgency, others[~forced[others]]))
        return fill_exactly(order, forced, self.size, take)


def _judge(
    window: Window, cost: FloatArray, by_cost: IntArray, items: _Items, config: PlanConfig
) -> Judge:
    """Waiting that a good split of what a mask of items keeps will have, over a mean batch's work.

    Not over the batch's own work: taking the dear samples early would seem to wait less, and it
    is the sum over all steps that counts.
    """
    order, load, tokens, own = by_cost, cost, window.tokens, config
    grouping = config.grouping if items.grouped else Grouping.IGNORE
    whole = grouping is Grouping.MICRO_BATCH
    if whole:
        load, own = cost_of_groups(cost, items.index, config), config_of_items(items.size, config)
        order, tokens = np.argsort(-load, kind="stable"), np.bincount(items.index)
        if config.micro_batch_tokens is not None:
            tokens = np.bincount(items.index, weights=window.tokens).astype(np.int64)
    x, s = load[order], tokens[order]
    work = float(x.sum()) * items.samples / len(window)
    by_item = np.bincount(items.index, weights=cost).astype(np.float64)

    def judge(keep: BoolArray) -> float:
        kept = (keep if whole else keep[items.index])[order]
        time = estimate(x[kept], s[kept], own)
        if grouping is Grouping.RANK:
            time = max(time, rank_bound(-np.sort(-by_item[keep]), config.dp_size))
        return (time * config.dp_size - float(x[kept].sum())) / (work or 1.0)

    return judge


def _neighbours(config: PlanConfig) -> int:
    """Samples that should be alike: those that start a micro-step, or all of a padded one."""
    padded = config.layout is Layout.PADDED
    return config.dp_size * ((config.micro_batch_size or tuning.ALIKE_IN_BUDGET) if padded else 1)
