"""Whether what ranks train on is as long as what producers push, over the last dispatches.

Compared are the lengths of what was dispatched, and of all that could have been: what was buffered
before the first of these dispatches, and what has come since. What was dropped is missing in one of
them, and what is passed over comes later. Any n samples stray that far from where they come from:

    distance <= 1.36 / sqrt(n)    in 95 % of all draws (Kolmogorov's distribution)

so a distance above that is no chance. It is asked of independent samples; those of a group are
alike, and then chance alone does more than this says.
"""

from collections import deque
from math import sqrt

from rollout_dispatcher.core.planning.lengths import LengthCounts, ks_distance
from rollout_dispatcher.core.totals import Totals
from rollout_dispatcher.plan import IntArray

#: Dispatches that are looked at together, as in `simulate`.
DISPATCHES = 20
#: Of Kolmogorov's distribution, the quantile of 95 %.
LEVEL = 1.358


class SelectionBias:
    """Follows `totals` from dispatch to dispatch."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        # What had left by each of the last dispatches: dispatched, and with what was dropped.
        self._left: deque[tuple[IntArray, IntArray]] = deque(maxlen=DISPATCHES + 1)
        self.dispatched()

    def restore(self, held: LengthCounts) -> None:
        """The totals were restored; held: what is buffered now, all else has left."""
        totals = self._totals
        gone = totals.arrived.counts - held.counts - totals.dispatched.counts
        totals.dropped_lengths.restore(gone.tolist(), 0)
        self._left.clear()
        self.dispatched()

    def dispatched(self) -> None:
        """A step was planned, and counted."""
        totals = self._totals
        dispatched = totals.dispatched.counts.copy()
        self._left.append((dispatched, dispatched + totals.dropped_lengths.counts))

    @property
    def distance(self) -> float:
        """Kolmogorov-Smirnov distance, 0 to 1; 0 while nothing was dispatched."""
        before, left_before = self._left[0]
        ours = self._totals.dispatched.counts - before
        return ks_distance(ours, self._totals.arrived.counts - left_before)

    @property
    def chance(self) -> float:
        """What chance alone keeps it below, 19 times of 20; 1 while nothing was dispatched."""
        samples = int((self._totals.dispatched.counts - self._left[0][0]).sum())
        return min(1.0, LEVEL / sqrt(samples)) if samples else 1.0
