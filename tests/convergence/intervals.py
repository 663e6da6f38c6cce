"""What several seeds say of a difference: its interval, and what that shows.

Two ways are the same for training if the whole interval of their difference lies within the margin:
a wide interval shows nothing, however close to zero its middle is.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

CONFIDENCE = 0.95
#: The margin: this share of what FIFO gains. Declared before anything was measured.
MARGIN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Interval:
    """Of a mean, by Student's t."""

    low: float
    high: float

    def is_within(self, margin: float) -> bool:
        """Whether all of it is closer to zero than the margin."""
        return -margin < self.low and self.high < margin

    def is_beyond(self, margin: float) -> bool:
        """Whether all of it is farther from zero than the margin."""
        return self.high < -margin or self.low > margin


def interval(values: Sequence[float]) -> Interval:
    """Where the mean of what these were drawn from lies; at least two of them."""
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(fmean(values) - half, fmean(values) + half)


def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """How many standard errors hold the mean with this confidence, by so many degrees of freedom.

    By bisection of the density's integral: 2.776 for 4, 2.262 for 9, at 95 %.
    """
    low, high = 0.0, 1000.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return low


def _within(bound: float, freedom: int) -> float:
    """Chance that Student's t is closer to zero than `bound`; x = sqrt(n) tan(angle)."""
    angles = np.linspace(0.0, math.atan(bound / math.sqrt(freedom)), 2001)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    density = np.cos(angles) ** (freedom - 1)
    return float(2 * math.exp(log_scale) * np.trapezoid(density, angles))


@dataclass(frozen=True, slots=True)
class Difference:
    """What one way has less FIFO, in the mean of the seeds, beside the margin."""

    mean: float
    interval: Interval
    margin: float

    @property
    def same(self) -> bool:
        """Whether it trains as FIFO does, as far as the margin goes."""
        return self.interval.is_within(self.margin)

    @property
    def detected(self) -> bool:
        """Whether it differs from FIFO for certain, and fails what the same passes."""
        return self.interval.is_beyond(0.0) and not self.same


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a task shows. Gains and differences are of scores, of which more is better.

    learns: FIFO does, for certain.
    """

    gain: float
    gain_interval: Interval
    margin: float
    differences: Mapping[str, Difference]

    @property
    def learns(self) -> bool:
        """Whether FIFO's gain is positive for certain."""
        return self.gain_interval.low > 0

    def shown(self, claimed: Collection[str], control: str) -> bool:
        """Whether FIFO learns, those claimed train as it does, and the control is detected."""
        found = self.differences
        same = all(each.same for name, each in found.items() if name in claimed)
        return self.learns and same and found[control].detected


def judge(first: float, fifo: Sequence[float], others: Mapping[str, Sequence[float]]) -> Verdict:
    """Compare final scores, an entry a seed in each; `first`: before training."""
    gains = [value - first for value in fifo]
    margin = MARGIN_SHARE * fmean(gains)
    return Verdict(
        gain=fmean(gains),
        gain_interval=interval(gains),
        margin=margin,
        differences={name: less(values, fifo, margin) for name, values in others.items()},
    )


def less(values: Sequence[float], fifo: Sequence[float], margin: float) -> Difference:
    """The difference of runs from FIFO's of the same seeds."""
    found = [value - other for value, other in zip(values, fifo, strict=True)]
    return Difference(fmean(found), interval(found), margin)
