"""Our own answers, by the planner's doors."""

import numpy as np

from rollout_dispatcher.errors import DispatcherError
from rollout_planner import balanced_partition, plan, validate_config
from rollout_planner.types import Grouping, Oversize, PlanConfig, Strategy, Window
from tests.peers.problem import Corner, Peer, Problem, Schedule, Unanswered


def config_of(problem: Problem) -> PlanConfig:
    """How the planner is asked."""
    n, size = len(problem.lengths), problem.micro_batch_size
    if size is None and problem.micro_batch_tokens is None:
        size = -(-n // problem.dp_size)
    grouping = Grouping.IGNORE if problem.group is None else Grouping.RANK
    return PlanConfig(
        dp_size=problem.dp_size,
        dispatch_batch_size=n,
        cost=problem.cost,
        micro_batch_size=size,
        micro_batch_tokens=problem.micro_batch_tokens,
        layout=problem.layout,
        sync=problem.sync,
        strategy=Strategy.WINDOW,
        grouping=Grouping.MICRO_BATCH if problem.together else grouping,
        oversize=Oversize.ALONE,
        micro_batch_multiple=problem.multiple,
        min_micro_batches=max(problem.minimum, problem.micro_batches or 1),
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
    parts = balanced_partition(problem.costs, problem.dp_size, equal_size=True)
    return [[part] for part in parts]


def ours() -> Peer:
    """Ourselves, answered like a peer."""
    solves = dict.fromkeys(Corner, solve)
    return Peer("ours", "", solves | {Corner.EQUAL: partition})
