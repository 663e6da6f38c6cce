"""Our own answers, by the planner's door."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from rollout_dispatcher import balance
from rollout_dispatcher.balance import plan, validate_config
from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.plan import Grouping, Oversize, PlanConfig, Strategy, Window
from tests.peers.problem import Corner, Peer, Problem, Schedule, Unanswered

#: The field of PlanConfig that says how many micro-batches a rank has at least.
MINIMUM = "min_micro_batches"


def config_of(problem: Problem) -> PlanConfig:
    """How the planner is asked; raises Unanswered for what it has no setting for."""
    n, size = len(problem.lengths), problem.micro_batch_size
    if size is None and problem.micro_batch_tokens is None:
        size = -(-n // problem.dp_size)
    known = {field.name for field in fields(PlanConfig)}
    more: dict[str, Any] = {}
    if problem.minimum > 1:
        more[MINIMUM] = problem.minimum
    elif problem.micro_batches is not None and MINIMUM in known:
        more[MINIMUM] = problem.micro_batches
    grouping = Grouping.IGNORE if problem.group is None else Grouping.RANK
    if problem.together:
        if "micro-batch" not in list(Grouping):
            raise Unanswered("there is no way to ask for groups in one micro-batch")
        grouping = Grouping("micro-batch")
    if unknown := more.keys() - known:
        raise Unanswered(f"PlanConfig has no {', '.join(unknown)}")
    return PlanConfig(
        dp_size=problem.dp_size,
        dispatch_batch_size=n,
        cost=problem.cost,
        micro_batch_size=size,
        micro_batch_tokens=problem.micro_batch_tokens,
        layout=problem.layout,
        sync=problem.sync,
        strategy=Strategy.WINDOW,
        grouping=grouping,
        oversize=Oversize.ALONE,
        micro_batch_multiple=problem.multiple,
        **more,
    )


def solve(problem: Problem) -> Schedule:
    """A plan of all samples; Unanswered if the planner refuses."""
    config, n = config_of(problem), len(problem.lengths)
    group = np.full(n, -1) if problem.group is None else problem.group
    window = Window(problem.lengths, np.zeros(n, np.int64), group, np.zeros(n, np.bool_))
    try:
        validate_config(config)
        return plan(window, config).micro_batches  # type: ignore[return-value]
    except DispatcherError as error:
        raise Unanswered(str(error)) from error


def partition(problem: Problem) -> Schedule:
    """`balanced_partition`, the planner's equal-size partition by itself."""
    door = getattr(balance, "balanced_partition", None)
    if door is None:
        raise Unanswered("balance.balanced_partition does not exist")
    parts: Sequence[Sequence[int]] = door(problem.costs, problem.dp_size, equal_size=True)
    return [[list(part)] for part in parts]


def ours() -> Peer:
    """Ourselves, answered like a peer."""
    solves = dict.fromkeys(Corner, solve)
    return Peer("ours", "", solves | {Corner.EQUAL: partition})
