"""What several seeds say of a difference: its interval, and what that shows.

Two ways are the same for training if the whole interval of their difference lies within the margin:
a wide interval shows nothing, however close to zero its middle is.
"""

import math
from collections.abc import Sequence
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
class Verdict:
    """What a task shows. Gains and differences are of expected rewards.

    learns: FIFO does, for certain. same: the window's difference from it is within the margin, all
    of its interval. detected: the control's is not, and none of its interval is 0.
    """

    gain: float
    gain_interval: Interval
    margin: float
    difference: float
    interval: Interval
    control_difference: float
    control_interval: Interval

    @property
    def learns(self) -> bool:
        """Whether FIFO's gain is positive for certain."""
        return self.gain_interval.low > 0

    @property
    def same(self) -> bool:
        """Whether the window trains as FIFO does, as far as the margin goes."""
        return self.interval.is_within(self.margin)

    @property
    def detected(self) -> bool:
        """Whether the control differs from FIFO for certain, and fails what the window passes."""
        found = self.control_interval
        return found.is_beyond(0.0) and not found.is_within(self.margin)

    @property
    def shown(self) -> bool:
        """Whether all of it holds."""
        return self.learns and self.same and self.detected


def judge(
    first: Sequence[float],
    fifo: Sequence[float],
    window: Sequence[float],
    control: Sequence[float],
) -> Verdict:
    """Compare final rewards, an entry a seed in each; `first`: before training."""
    gains = _less(fifo, first)
    differences, controls = _less(window, fifo), _less(control, fifo)
    return Verdict(
        gain=fmean(gains),
        gain_interval=interval(gains),
        margin=MARGIN_SHARE * fmean(gains),
        difference=fmean(differences),
        interval=interval(differences),
        control_difference=fmean(controls),
        control_interval=interval(controls),
    )


def _less(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value - other for value, other in zip(values, others, strict=True)]
