"""The door to planning: a window and a config in, a plan out.

Invariant: a plan depends on nothing but its arguments. It takes every sample at most once and
takes exactly what was asked for; all ranks get the same number of micro-batches.
"""

import hashlib
from dataclasses import replace

import numpy as np

from rollout_dispatcher.balance.bounds import rank_bound
from rollout_dispatcher.balance.objective import lower_bound
from rollout_dispatcher.balance.select.choose import choose
from rollout_dispatcher.balance.select.groups import group_index
from rollout_dispatcher.balance.split.parts import Batch, matrix
from rollout_dispatcher.balance.split.split import plain_split, split
from rollout_dispatcher.balance.validate import validate_config
from rollout_dispatcher.errors import GroupTooLong, PlanError, SampleTooLong
from rollout_dispatcher.plan import (
    FloatArray,
    Grouping,
    IntArray,
    Oversize,
    Plan,
    PlanConfig,
    Window,
    imbalance,
    round_up,
    straggler_excess,
)

__all__ = ["plan", "plan_digest", "validate_config"]


def plan(window: Window, config: PlanConfig, take: int | None = None) -> Plan:
    """Choose `take` samples (default: a dispatch batch, or all if fewer) and split them.

    Raises SampleTooLong or GroupTooLong for a sample above the token budget, or a group that has to
    stay in one micro-batch, unless such go alone; and PlanError for a window whose columns disagree
    or that no group fits, and for a group of more samples than a micro-batch has.
    """
    window = _padded(window, config.sample_length_multiple)
    cost = _checked_cost(window, config)
    take = min(len(window), config.dispatch_batch_size if take is None else take)
    if take < 1:
        raise PlanError(f"{take} samples to plan from a window of {len(window)}; wait for more")
    chosen = choose(window, cost, config, take)
    group = _groups(window.group[chosen], config)
    batch = Batch.of(cost[chosen], window.tokens[chosen], group)
    parts = split(batch, config, config.strategy)
    costs = matrix(batch, parts, config.layout)
    plain = matrix(batch, plain_split(batch, config), config.layout)
    return Plan(
        micro_batches=parts.positions(chosen),
        cost=costs,
        sync=config.sync,
        fifo_imbalance=imbalance(plain),
        fifo_excess=straggler_excess(plain, config.sync),
        lower_bound=_bound(batch, parts.counts.shape[1], config),
    )


def plan_digest(plan: Plan) -> str:
    """Fingerprint of who trains on what and when: equal for equal micro-batches, 32 hex digits."""
    counts = [[len(part) for part in rank] for rank in plan.micro_batches]
    shape = np.array([len(counts), len(counts[0])], dtype="<i8")
    digest = hashlib.sha256(shape.tobytes())
    digest.update(np.array(counts, dtype="<i8").tobytes())
    digest.update(plan.chosen.astype("<i8").tobytes())
    return digest.hexdigest()[:32]


def _groups(group: IntArray, config: PlanConfig) -> IntArray | None:
    """Dense group numbers where groups matter to the split, and there are any."""
    if config.grouping in (Grouping.IGNORE, Grouping.STEP) or not (group >= 0).any():
        return None
    return group_index(group)


def _bound(batch: Batch, M: int, config: PlanConfig) -> float:
    """Time that no split can beat; no rank has less than the dearest group that stays on one."""
    bound = lower_bound(batch.x, M, config)
    if batch.group is None:
        return bound
    load = np.bincount(batch.group, weights=batch.cost).astype(np.float64)
    return max(bound, rank_bound(-np.sort(-load), config.dp_size))


def _padded(window: Window, multiple: int) -> Window:
    """The window with the tokens that ranks compute for each sample."""
    if multiple == 1:
        return window
    return replace(window, tokens=round_up(window.tokens, multiple))


def _checked_cost(window: Window, config: PlanConfig) -> FloatArray:
    n = len(window)
    if not (len(window.skips) == len(window.group) == len(window.must_go) == n):
        raise PlanError("the window's columns differ in length; pass one row per sample")
    budget = config.micro_batch_tokens
    if budget is not None and config.oversize is not Oversize.ALONE and n:
        longest = int(window.tokens.max())
        if longest > budget:
            raise SampleTooLong(longest, budget)
        if config.grouping is Grouping.MICRO_BATCH:
            _check_groups(window, budget)
    cost = config.cost(window.tokens)
    if not (cost.min(initial=0.0) >= 0 and cost.max(initial=0.0) < np.inf):
        raise PlanError("the cost model gave a cost that is negative or not finite; check it")
    return cost


def _check_groups(window: Window, budget: int) -> None:
    """Raise GroupTooLong if a group has more tokens than the micro-batch that it has to stay in."""
    index = group_index(window.group)
    tokens = np.bincount(index, weights=window.tokens)
    longest = int(tokens.argmax())
    if tokens[longest] > budget:
        raise GroupTooLong(int(np.count_nonzero(index == longest)), int(tokens[longest]), budget)
