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
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Totals:
    """Of a step over all DP ranks: N, the sum of w, S, and V by a group's number.

    groups: None where no sample has a group, or nobody asks; each sample is one of its own then.
    expected: the sum of w that so many samples have as a rule; None if nobody asks.
    """

    samples: int
    weight: float
    weighted_samples: int
    groups: FloatArray | None = None
    expected: int | None = None


class Share(Enum):
    """What every weight is divided by: nothing, W of its sample, or V of its sample's group."""

    NOTHING = 0
    SAMPLE = 1
    GROUP = 2


class Normaliser(Protocol):
    """A way to average: the loss is the sum of l * w / share, over a denominator."""

    @property
    def share(self) -> Share:
        """What every weight is divided by."""

    def denominator(self, totals: Totals) -> float:
        """What the loss of the whole step is divided by."""
