"""Karmarkar-Karp: ranks of equally many samples and nearly equal sums, by largest differencing."""

import numpy as np

from rollout_planner.split.groups import by_neighbours
from rollout_planner.split.karmarkar_karp import differencing_labels
from rollout_planner.strategies.rank_by_rank import RankByRank
from rollout_planner.strategies.strategy import PlanningStrategy
from rollout_planner.types import FloatArray, IntArray


def largest_differencing(x: FloatArray, R: int, cap: int) -> IntArray:
    """See `Assign`; counts differ by one at most, even if the cap would allow more."""
    padded = np.append(x, np.zeros(-len(x) % R))
    assert len(padded) <= R * cap, "ranks that may take so few have no room for all"
    return differencing_labels(_as_integers(padded), R, equal_size=True)[: len(x)]


def _as_integers(x: FloatArray) -> list[int]:
    """Costs as integers: exact where they are whole, else to one part in 2^50."""
    largest = float(x.max(initial=0.0))  # of whole groups the first need not be
    if largest >= 2.0**62 or (x != np.rint(x)).any():
        x = np.rint(x * (2.0**50 / max(largest, 1e-290)))
    whole: list[int] = x.astype(np.int64).tolist()
    return whole


STRATEGY: PlanningStrategy = RankByRank(largest_differencing, by_neighbours)
