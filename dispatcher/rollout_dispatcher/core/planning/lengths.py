"""Counts of sample lengths in fine logarithmic bins: what arrived against what was dispatched.

Eight bins an octave keep the error of a quantile under 9 % at a fixed 256 counters, however many
samples a run sees. The Kolmogorov-Smirnov distance of two counts is how far selection has bent
the distribution of lengths that the trainer sees.
"""

from collections.abc import Sequence

import numpy as np

from rollout_planner.types import IntArray

BINS_PER_OCTAVE = 8
OCTAVES = 32
#: Powers of two that are shown: to twice the longest sample that is taken unless told otherwise.
SHOWN = range(4, 22)
#: Lengths are counted so many at a time, or when somebody looks: numpy is slow to start.
COUNTED_TOGETHER = 1024
#: The shortest length of each bin, in tokens.
_SHORTEST = np.ceil(np.exp2(np.arange(BINS_PER_OCTAVE * OCTAVES) / BINS_PER_OCTAVE))


class LengthCounts:
    """How many samples of about which length, in tokens."""

    def __init__(self) -> None:
        self._counts = np.zeros(BINS_PER_OCTAVE * OCTAVES, np.int64)
        self._uncounted: list[int] = []
        self.samples = self.tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Count samples of so many tokens each, at least 1."""
        self.samples += len(tokens)
        self.tokens += sum(tokens)
        self._uncounted += tokens
        if len(self._uncounted) >= COUNTED_TOGETHER:
            self._count()

    @property
    def counts(self) -> IntArray:
        """Samples by bin."""
        self._count()
        return self._counts

    def _count(self) -> None:
        self._counts += np.bincount(bins_of(self._uncounted), minlength=len(self._counts))
        self._uncounted.clear()

    def restore(self, counts: list[int], tokens: int) -> None:
        """Start from what an earlier process had counted."""
        self._counts, self.samples, self.tokens = np.array(counts), sum(counts), tokens

    def octaves(self) -> list[tuple[int, int]]:
        """Pairs of (2**k, samples shorter than that), for the same k whatever was seen."""
        below = self.counts.reshape(OCTAVES, BINS_PER_OCTAVE).sum(axis=1).cumsum().tolist()
        return [(2**k, below[k - 1]) for k in SHOWN]


def bins_of(tokens: Sequence[int] | IntArray) -> IntArray:
    """The bin of each length."""
    return np.searchsorted(_SHORTEST, tokens, "right") - 1


def ks_distance(ours: IntArray, theirs: IntArray) -> float:
    """Kolmogorov-Smirnov distance of two counts by bin, 0 to 1; 0 while either is empty."""
    below, others_below = ours.cumsum(), theirs.cumsum()
    if not below[-1] or not others_below[-1]:
        return 0.0
    return float(np.abs(below / below[-1] - others_below / others_below[-1]).max())
