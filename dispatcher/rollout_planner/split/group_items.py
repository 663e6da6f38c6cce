"""Splitting when a group has to stay in one micro-batch: groups are split as samples are elsewhere.

Invariant: all samples of a group are in the same micro-batch, which holds at most what it may, or
a single group that alone exceeds the token budget.

A group becomes an item with the tokens and the cost of its members together, or of its longest as
often as it has members where the layout pads. With a fixed micro-batch size, groups of one size
are so many items a micro-batch; groups of different sizes are packed as under a token budget, with
samples for tokens.

Example: micro-batches of 8 samples hold two groups of 4 each, or one of 5 beside one of 3.

Groups that leave together: whole groups are chosen, exactly `take` samples where sizes allow.

Invariant: a group is taken whole or not at all; the total is the largest that whole groups can
reach within `take`, given those that are due.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_planner.errors import PlanError
from rollout_planner.order import running_sums
from rollout_planner.split.parts import Batch, Padded, Parts
from rollout_planner.types import BoolArray, FloatArray, Grouping, IntArray, Layout, PlanConfig


def group_items(batch: Batch, group: IntArray, config: PlanConfig) -> tuple[Batch, PlanConfig]:
    """Groups as items, and how these are split. group: dense group number of each sample.

    Raises PlanError for a group of more samples than a micro-batch has, and for budgets of padded
    tokens: what a group takes of one depends on what it is padded to.
    """
    if config.pads_to_budget:
        raise PlanError(
            "groups that stay in one micro-batch cannot share a budget of padded tokens; set "
            "--micro-batch-size, --layout packed, or --groups rank"
        )
    size, m = np.bincount(group), config.micro_batch_size
    if m is not None and size.max() > m:
        raise PlanError(
            f"a group has {size.max()} samples and a micro-batch holds {m}; groups stay in one "
            "micro-batch, so raise --micro-batch-size to the size of a group, or set --groups rank"
        )
    own = config_of_items(size, config)
    cost, tokens = cost_of_groups(batch.cost, group, config), size
    if m is None:
        tokens = np.bincount(group, weights=batch.tokens).astype(np.int64)
    if own.micro_batch_tokens is not None:
        return replace(Batch.of(cost, tokens), padded=_padded(batch.cost, group, size, config)), own
    return Batch(cost, tokens, None, np.argsort(-cost, kind="stable")), own


def _padded(cost: FloatArray, group: IntArray, size: IntArray, config: PlanConfig) -> Padded | None:
    """What a micro-batch pads: groups whose longest and whose size both differ share one."""
    return Padded(group_max(cost, group), size) if config.layout is Layout.PADDED else None


def config_of_items(size: IntArray, config: PlanConfig) -> PlanConfig:
    """How groups of these sizes are split as items."""
    m, alike = config.micro_batch_size, replace(config, grouping=Grouping.IGNORE)
    if m is None:
        return alike
    if np.ptp(size):
        return replace(alike, micro_batch_size=None, micro_batch_tokens=m, layout=Layout.PACKED)
    return replace(alike, micro_batch_size=max(m // int(size[0]), 1))


def cost_of_groups(cost: FloatArray, group: IntArray, config: PlanConfig) -> FloatArray:
    """What each group costs a micro-batch: all of its samples, padded to the longest if so laid."""
    if config.layout is Layout.PADDED:
        return group_max(cost, group) * np.bincount(group)
    return np.bincount(group, weights=cost).astype(np.float64)


def members_of_items(parts: Parts, group: IntArray) -> Parts:
    """Micro-batches of the samples of the groups that `parts` has."""
    size = np.bincount(group)
    by_group = np.argsort(group, kind="stable")
    starts = np.cumsum(size) - size
    own, counts = size[parts.sequence], parts.counts.ravel()
    held = running_sums(own)
    place = np.arange(len(group)) - np.repeat(held[:-1], own)
    sequence = by_group[np.repeat(starts[parts.sequence], own) + place]
    ends = np.cumsum(counts)
    return Parts(sequence, (held[ends] - held[ends - counts]).reshape(parts.counts.shape))


Number = TypeVar("Number", np.int64, np.float64)


def group_index(group: IntArray) -> IntArray:
    """Dense group number of each sample, by first arrival; a sample without one is its own."""
    own = np.where(group < 0, group.max(initial=0) + 1 + np.arange(len(group)), group)
    _, first, inverse = np.unique(own, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    dense: IntArray = rank[inverse]
    return dense


def group_max(values: NDArray[Number], index: IntArray) -> NDArray[Number]:
    """Largest value of each group's members."""
    order = np.argsort(index, kind="stable")
    starts = np.flatnonzero(np.diff(index[order], prepend=-1))
    largest: NDArray[Number] = np.maximum.reduceat(values[order], starts)
    return largest


def fill_exactly(preferred: IntArray, forced: BoolArray, size: IntArray, take: int) -> BoolArray:
    """Whole groups, in order of preference, that together come as close to `take` as can be.

    Subset sums as bits of one integer: bit t of reach[i] says that the groups from the i-th on
    can total t samples. A group is taken if the best total can still be reached after it.
    Example: sizes 3 2 2 in this order, take 4: 4 can be reached by 2 + 2 only, so 3 is left out.
    """
    chosen = np.zeros(len(size), dtype=bool)
    for g in preferred[forced[preferred]].tolist():
        if size[g] <= take:
            chosen[g] = True
            take -= int(size[g])
    rest = preferred[~forced[preferred]]
    sizes = size[rest].tolist()
    mask = (1 << (take + 1)) - 1
    reach = [1]
    for count in reversed(sizes):
        reach.append((reach[-1] | reach[-1] << count) & mask)
    reach.reverse()
    left = reach[0].bit_length() - 1
    for g, count, after in zip(rest.tolist(), sizes, reach[1:], strict=True):
        if count <= left and after >> (left - count) & 1:
            chosen[g] = True
            left -= count
    return chosen
