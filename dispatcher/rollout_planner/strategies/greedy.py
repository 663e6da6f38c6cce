"""LPT: the largest sample first, always to the least loaded rank."""

from rollout_planner.split.assign import lpt, lpt_budget
from rollout_planner.strategies.rank_by_rank import RankByRank
from rollout_planner.strategies.strategy import PlanningStrategy
from rollout_planner.types import FloatArray, IntArray


def least_loaded(x: FloatArray, R: int, cap: int) -> IntArray:
    """See `Assign`."""
    return lpt(x, R, cap)


STRATEGY: PlanningStrategy = RankByRank(least_loaded, lpt_budget)
