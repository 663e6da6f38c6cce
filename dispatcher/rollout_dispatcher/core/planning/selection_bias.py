"""Whether what ranks train on is as long as what producers push, over the last dispatches.

Compared are the lengths of what was dispatched, and of all that could have been: what was buffered
before the first of these dispatches, and what has come since. What was dropped is missing in one of
them, and what is passed over comes later. Any n samples stray that far from where they come from:

    distance <= 1.36 / sqrt(n)    in 95 % of all draws (Kolmogorov's distribution)

so a distance above that is no chance. It is asked of independent samples; those of a group are
alike, and then chance alone does more than this says.

A distance over several dispatches says nothing of single ones: `StepMix` looks at each by itself.
"""

from collections import deque
from math import sqrt

import numpy as np

from rollout_dispatcher.core.planning.lengths import LengthCounts, bins_of, ks_distance
from rollout_dispatcher.core.planning.step_mix import LONGEST, StepMix
from rollout_dispatcher.core.totals import Totals
from rollout_planner.types import FloatArray, IntArray

#: Dispatches that are looked at together, as in `simulate`.
DISPATCHES = 20
#: Dispatches that are looked at one by one: few have any of the longest samples.
SINGLE_DISPATCHES = 100
#: Of Kolmogorov's distribution, the quantile of 95 %.
LEVEL = 1.358


class SelectionBias:
    """Follows `totals` from dispatch to dispatch."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        # What had left by each of the last dispatches: dispatched, and with what was dropped.
        self._left: deque[tuple[IntArray, IntArray]] = deque(maxlen=DISPATCHES + 1)
        self._steps: deque[tuple[IntArray, FloatArray, float]] = deque(maxlen=SINGLE_DISPATCHES)
        self._mark()

    def restore(self, held: LengthCounts) -> None:
        """The totals were restored; held: what is buffered now, all else has left."""
        totals = self._totals
        gone = totals.arrived.counts - held.counts - totals.dispatched.counts
        totals.dropped_lengths.restore(gone.tolist(), 0)
        self._left.clear()
        self._mark()

    def dispatched(self, tokens: IntArray, loss_tokens: IntArray, work: float) -> None:
        """A step was planned, and counted: of these samples, and so much work, in cost."""
        self._mark()
        bins, count = bins_of(tokens), len(self._totals.arrived.counts)
        counts = np.bincount(bins, minlength=count)
        loss = np.bincount(bins, weights=loss_tokens, minlength=count).astype(np.float64)
        self._steps.append((counts, loss, work))

    def _mark(self) -> None:
        totals = self._totals
        dispatched = totals.dispatched.counts.copy()
        self._left.append((dispatched, dispatched + totals.dropped_lengths.counts))

    @property
    def mix(self) -> StepMix | None:
        """Of the last dispatches, one by one; None while there is none."""
        if not self._steps:
            return None
        arrived = self._totals.arrived.counts
        from_long_end = arrived[::-1].cumsum()
        long = len(arrived) - 1 - int(np.searchsorted(from_long_end, LONGEST * from_long_end[-1]))
        counts, loss, work = map(np.array, zip(*self._steps, strict=True))
        below = counts.cumsum(axis=1) / counts.sum(axis=1, keepdims=True)
        apart = np.abs(below - arrived.cumsum() / arrived.sum()).max(axis=1)
        return StepMix.of(
            loss.sum(axis=1),
            loss[:, long:].sum(axis=1),
            with_long=counts[:, long:].sum(axis=1) > 0,
            work=work,
            distances=apart,
        )

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
