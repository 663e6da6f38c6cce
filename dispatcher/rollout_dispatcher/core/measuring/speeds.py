"""How slow each DP rank is beside the others.

What ranks took is compared with what their work was estimated to take, so unequal shares are no
fault of a rank's. A single long step (garbage collection, a checkpoint, a first kernel) has no say:
of a rank's last steps the median counts.
"""

from collections import deque

import numpy as np

from rollout_planner.types import FloatArray

#: Steps of which the median counts; as many long ones as are left of it on one side are ignored.
RECENT, REMEMBERED = 8, 32
#: Measured steps before anything is said: the median of fewer has no outliers.
FEWEST = 3
#: Plans go by a speed once the median of so many steps is that far off what they are made with:
#: few show what is much, more show what is less. And so many of its standard errors.
JUDGED = ((RECENT, 0.05), (REMEMBERED, 0.02))
SURE = 5.0
#: A rank that is so much off the median one is no longer a matter of how much work it has.
FASTEST, SLOWEST = 0.25, 4.0


def lower_median(values: FloatArray) -> FloatArray:
    """Over the first axis, without nan; of an even number the lower one in the middle.

    Where half of the ranks are slow, the others are thus what they are compared with.
    """
    return _lower_quantile(values, 0.5)


def _lower_quantile(values: FloatArray, part: float) -> FloatArray:
    ordered = np.sort(values, axis=0)  # nan last
    known = len(values) - np.isnan(values).sum(axis=0)
    at = np.maximum(np.ceil(known * part).astype(np.int64) - 1, 0)
    found: FloatArray = ordered[at, np.arange(len(at))] if known.ndim else ordered[at]
    return found


class RankSpeeds:
    """Seconds a unit of work, of each rank over the median rank's."""

    def __init__(self, dp_size: int) -> None:
        self._recent: deque[FloatArray] = deque(maxlen=REMEMBERED)
        #: float64[R], 1 for a rank as fast as the median one; nan where nothing can be told.
        self.slowness = np.full(dp_size, np.nan)

    def add(self, seconds: FloatArray, work: FloatArray) -> None:
        """A step was measured: seconds, float64[R], and work as estimated, float64[R, M]."""
        of_ranks = work.sum(axis=1)
        pace = np.full(len(of_ranks), np.nan)
        np.divide(seconds, of_ranks, out=pace, where=(of_ranks > 0) & (seconds > 0))
        self._recent.append(pace / lower_median(pace))
        if len(self._recent) >= FEWEST:
            typical = lower_median(np.array(self._recent)[-RECENT:])
            self.slowness = np.where(np.isnan(typical), self.slowness, typical)

    def revised(self, used: tuple[float, ...]) -> tuple[float, ...]:
        """What plans should be made with: `used`, but where steps since have surely shown another.

        A median of n has a standard error of 1.25 deviations over the root of n. A deviation is
        0.87 of what three quarters are within, so that half of the steps before a change and half
        behind it show nothing yet; and no less than the median rank's. Then what was seen counts no
        more: the next change has to be shown anew.
        """
        for steps, worth in JUDGED:
            if len(self._recent) < steps:
                break
            rows = np.array(self._recent)[-steps:]
            typical = lower_median(rows)
            spread = 0.87 * _lower_quantile(np.abs(rows - typical), 0.75)
            error = 1.25 * np.maximum(spread, lower_median(spread)) / steps**0.5
            sure = np.abs(typical - used) > np.maximum(worth, SURE * error)
            if sure.any():
                self._recent.clear()
                found = np.clip(np.round(typical, 2), FASTEST, SLOWEST)
                found = np.where(np.abs(found - 1) <= worth, 1.0, found)
                return tuple(np.where(sure, found, used).tolist())
        return used
