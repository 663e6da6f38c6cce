"""What a normaliser is told, and what it says.

Symbols, here and in each normaliser's formula:

    l[i,t]  loss of token t of sample i        N  samples of the step, over all DP ranks
    w[i,t]  its weight; of a mask, 1 or 0      S  those of them that have any weight
    W[i]    sum over t of w[i,t]               G  groups that have any weight
    g(i)    group of sample i                  V[g]  sum of W[i] over the samples of group g

Fillers are no samples, and neither are members of groups that were dropped. All sums are over the
whole step, whatever its size.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Totals:
    """Of a step over all DP ranks: N, the sum of w, S, and V by a group's number.

    groups: None where no sample has a group, or nobody asks; each sample is one of its own then.
    """

    samples: int
    weight: float
    weighted_samples: int
    groups: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """Of one micro-batch: W of each sample, float64[n], and the number of its group, int[n]."""

    weights: FloatArray
    groups: NDArray[np.int64] | None = None


class Normaliser(Protocol):
    """A way to average: the loss is the sum of l * w / share, over a denominator."""

    @property
    def by_group(self) -> bool:
        """Whether it has to be told of groups."""

    def shares(self, samples: Samples, totals: Totals) -> FloatArray | None:
        """What the weights of each sample are divided by, [n]; None for nothing.

        0 only where the weights are 0.
        """

    def denominator(self, totals: Totals) -> float:
        """What the loss of the whole step is divided by."""
