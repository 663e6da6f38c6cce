"""Speeds of the DP ranks, relative to each other.

Measured times are divided by the estimated work, so a rank with more work is not slower. A rank's
speed is the median of its last steps, so that a single long step (garbage collection, a checkpoint,
a first kernel) has no effect.
"""

from collections import deque

import numpy as np

from rollout_planner.types import FloatArray

#: Steps of the median for people, and steps that are kept.
RECENT, REMEMBERED = 8, 32
#: Measured steps before a speed is known: a median of fewer ignores no outlier.
FEWEST = 3
#: Plans use another speed once the median of so many steps deviates by that share, and by so many
#: standard errors: few steps show a large deviation, more steps a small one.
JUDGED = ((RECENT, 0.05), (REMEMBERED, 0.02))
SURE = 5.0
#: Bounds of a slowness in plans: less work does not help a slower rank.
FASTEST, SLOWEST = 0.25, 4.0


def pace(seconds: FloatArray, work: FloatArray) -> FloatArray:
    """Each rank's seconds, float64[R], for a unit of work, float64[R, M]; nan without either."""
    of_ranks = work.sum(axis=1)
    found = np.full(len(of_ranks), np.nan)
    np.divide(seconds, of_ranks, out=found, where=(of_ranks > 0) & (seconds > 0))
    return found


def lower_median(values: FloatArray) -> FloatArray:
    """Over the first axis, without nan; of an even number, the lower one of the middle two.

    If half of the ranks are slow, they are compared with the others.
    """
    return _lower_quantile(values, 0.5)


def _lower_quantile(values: FloatArray, part: float) -> FloatArray:
    ordered = np.sort(values, axis=0)  # nan last
    known = len(values) - np.isnan(values).sum(axis=0)
    at = np.maximum(np.ceil(known * part).astype(np.int64) - 1, 0)
    found: FloatArray = ordered[at, np.arange(len(at))] if known.ndim else ordered[at]
    return found


class RankSpeeds:
    """Each rank's seconds for a unit of work, over the median rank's."""

    def __init__(self, dp_size: int) -> None:
        self._recent: deque[FloatArray] = deque(maxlen=REMEMBERED)
        #: float64[R], 1 for a rank as fast as the median one; nan if not known.
        self.slowness = np.full(dp_size, np.nan)

    def add(self, seconds: FloatArray, work: FloatArray) -> None:
        """Add a measured step: seconds, float64[R], and estimated work, float64[R, M]."""
        paces = pace(seconds, work)
        self._recent.append(paces / lower_median(paces))
        if len(self._recent) >= FEWEST:
            typical = lower_median(np.array(self._recent)[-RECENT:])
            self.slowness = np.where(np.isnan(typical), self.slowness, typical)

    def revised(self, used: tuple[float, ...]) -> tuple[float, ...]:
        """Slowness for plans: `used`, except where steps since have surely shown another.

        A median of n has a standard error of 1.25 deviations over the root of n. A deviation is
        0.87 of the third quartile, so that a change shows only once it holds for more than half of
        the steps; and at least the median rank's. After a change all steps are forgotten.
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
