"""Counts of sample lengths in fine logarithmic bins: what arrived against what was dispatched.

Eight bins an octave keep the error of a quantile under 9 % at a fixed 256 counters, however many
samples a run sees. The Kolmogorov-Smirnov distance of two counts is how far selection has bent
the distribution of lengths that the trainer sees.
"""

from itertools import accumulate
from math import log2

BINS_PER_OCTAVE = 8
OCTAVES = 32


class LengthCounts:
    """How many samples of about which length, in tokens."""

    def __init__(self) -> None:
        self.counts = [0] * (BINS_PER_OCTAVE * OCTAVES)
        self.samples = self.tokens = 0

    def add(self, tokens: int) -> None:
        """Count one sample of `tokens` (at least 1) tokens."""
        self.counts[int(log2(tokens) * BINS_PER_OCTAVE)] += 1
        self.samples += 1
        self.tokens += tokens

    def restore(self, counts: list[int], tokens: int) -> None:
        """Start from what an earlier process had counted."""
        self.counts, self.samples, self.tokens = list(counts), sum(counts), tokens

    def octaves(self) -> list[tuple[int, int]]:
        """Pairs of (2**k, samples shorter than that), up to the longest sample seen."""
        pairs, below = [], 0
        for octave in range(OCTAVES):
            start = octave * BINS_PER_OCTAVE
            below += sum(self.counts[start : start + BINS_PER_OCTAVE])
            pairs.append((2 ** (octave + 1), below))
            if below == self.samples:
                break
        return pairs

    def distance(self, other: "LengthCounts") -> float:
        """Kolmogorov-Smirnov distance, 0 to 1; 0 while either is empty."""
        if not self.samples or not other.samples:
            return 0.0
        ours, theirs = accumulate(self.counts), accumulate(other.counts)
        pairs = zip(ours, theirs, strict=True)
        return max(abs(a / self.samples - b / other.samples) for a, b in pairs)
