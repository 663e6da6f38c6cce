"""How slow each DP rank is beside the others.

What ranks took is compared with what their plans had estimated, so unequal shares are no fault of a
rank's. A single long step (garbage collection, a checkpoint, a first kernel) has no say: of a
rank's last steps the median counts, and that is smoothed. Steps are looked at when somebody wants
to know, as far as they still count by then: however short they are, they cost next to nothing.
"""

from collections import deque

import numpy as np

from rollout_planner.types import FloatArray

#: Steps of which the median counts; as many long ones as are left of it on one side are ignored.
RECENT = 5
#: Measured steps before anything is said: the median of fewer has no outliers.
FEWEST = 3
#: Weight of the newest step, and steps before it that have any.
SMOOTHING = 1 / 8
REMEMBERED = 32


def lower_median(values: FloatArray) -> FloatArray:
    """Over the first axis, without nan; of an even number the lower one in the middle.

    Where half of the ranks are slow, the others are thus what they are compared with.
    """
    ordered = np.sort(values, axis=0)  # nan last
    known = len(values) - np.isnan(values).sum(axis=0)
    middle = np.maximum(known - 1, 0) // 2
    found: FloatArray = ordered[middle, np.arange(len(middle))] if known.ndim else ordered[middle]
    return found


class RankSpeeds:
    """Seconds a unit of planned cost, of each rank over the median rank's."""

    def __init__(self, dp_size: int) -> None:
        self._unseen: deque[tuple[FloatArray, FloatArray]] = deque(maxlen=REMEMBERED)
        self._recent = np.full((RECENT, dp_size), np.nan)
        self._noted = 0
        self._slowness = np.full(dp_size, np.nan)
        self._steps = np.zeros(dp_size, np.int64)

    def note(self, seconds: FloatArray, planned: FloatArray) -> None:
        """A step was measured: seconds, float64[R], and estimates, float64[R, M]."""
        self._unseen.append((seconds, planned))

    def _look_at(self, seconds: FloatArray, work: FloatArray) -> None:
        pace = np.full(len(work), np.nan)
        np.divide(seconds, work, out=pace, where=(work > 0) & (seconds > 0))
        self._recent[self._noted % RECENT] = pace / lower_median(pace)
        self._noted += 1
        if self._noted < FEWEST:
            return
        typical = lower_median(self._recent)
        known = ~np.isnan(typical)
        self._steps += known
        weight = np.maximum(SMOOTHING, 1 / np.maximum(self._steps, 1))
        before = np.where(np.isnan(self._slowness), typical, self._slowness)
        self._slowness = np.where(known, before + weight * (typical - before), before)

    @property
    def slowness(self) -> FloatArray:
        """float64[R], 1 for a rank as fast as the median one; nan where nothing can be told."""
        while self._unseen:
            seconds, planned = self._unseen.popleft()
            self._look_at(seconds, planned.sum(axis=1))
        return self._slowness
