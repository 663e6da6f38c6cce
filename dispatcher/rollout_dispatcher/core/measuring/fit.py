"""The cost of samples fitted to what micro-batches took.

A micro-batch of samples of s tokens takes  a * sum s^2 + b * sum s + c * n + d  seconds (padded,
each s is the longest one's). Well balanced micro-batches are alike and separate the terms badly, so
the prior decides the rest: log(b / a) is normal around the prior's value, c and d are normal with
small shares of the time, and the fit is the most probable one. Errors are relative; a few large
ones, as of a garbage collection or a checkpoint, have little weight (Huber 1964).

Invariant: the same observations give the same fit; none of the four is negative, nor all of the
first two 0.
"""

from itertools import combinations
from typing import NamedTuple

import numpy as np

from rollout_planner.types import CostModel, FloatArray, IntArray, summed

#: Terms of the model: sum of squares, sum, count, one.
TERMS = 4
#: The oldest of `REMEMBERED` observations has this weight.
REMEMBERED, KEPT_WEIGHT = 4096, 0.1
#: Prior standard deviations: of log(b / a), and of c's and d's shares of the time.
RATIO_OFF, SAMPLES_OFF, BEGIN_OFF = 1.0, 0.003, 0.05
#: Ratios b / a that are tried, as multiples of the prior's; and the factor around the mean length
#: to which the prior's is clamped, as a prior may lack one of the two terms.
RATIOS, MOST_RATIO = np.exp(np.linspace(-6, 6, 241)), 100.0
#: Rounds of weights, and from where on a deviation counts linearly, in typical deviations.
ROUNDS, FAR = 4, 1.5
#: Added to the diagonal, so that singular equations can be solved.
ALONE = 1e-9
#: Smallest typical relative deviation, and the first guess of it.
LEAST_ERROR, ERROR = 0.005, 0.05
#: Terms of a fit: 0 for a and b by their ratio, 1 for c, 2 for d.
_SUBSETS = [(0, *rest) for size in (2, 1, 0) for rest in combinations((1, 2), size)]


class Fit(NamedTuple):
    """coefficients: float64[4], seconds for each term. error: typical relative deviation."""

    coefficients: FloatArray
    error: float


def terms_of(s: IntArray, counts: IntArray) -> FloatArray:
    """Terms of micro-batches, float64[..., 4]. s: tokens computed for each sample. counts: samples
    of each micro-batch.
    """
    x = s.astype(np.float64)
    sums = [summed(x * x, counts), summed(x, counts)]
    return np.stack([*sums, counts.astype(np.float64), np.ones(counts.shape)], axis=-1)


def fit_cost(terms: FloatArray, seconds: FloatArray, prior: CostModel) -> Fit:
    """The most probable coefficients. terms: float64[n, 4] of micro-batches, oldest first. seconds:
    float64[n].
    """
    rows = terms / seconds[:, None]
    kept = KEPT_WEIGHT ** (np.arange(len(rows))[::-1] / REMEMBERED)
    ratio, share = _prior_ratio(terms, prior), median(rows[:, 2:])
    fit, robust, error = np.zeros(TERMS), np.ones(len(rows)), ERROR
    for _ in range(ROUNDS):
        fit = _solved(rows, kept * robust / error**2, ratio, share)
        off = np.abs(rows @ fit - 1)
        error = max(float(median(off)) / 0.6745, LEAST_ERROR)
        robust = np.minimum(1.0, FAR * error / np.maximum(off, 1e-12))
    return Fit(fit, error)


def median(values: FloatArray) -> FloatArray:
    """Over the first axis; of few values in a tenth of the time of `np.median`, to the last bit."""
    ordered = np.sort(values, axis=0)
    found: FloatArray = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return found


def improbability(off: FloatArray, error: float) -> float:
    """Huber's loss of relative deviations, of which `error` is a typical one, as a sum."""
    size = np.abs(off) / error
    return float(np.where(size <= FAR, size**2 / 2, FAR * (size - FAR / 2)).sum())


def _prior_ratio(terms: FloatArray, prior: CostModel) -> float:
    """B / a of the prior, at lengths from the mean to some times it."""
    mean = max(float(terms[:, 1].sum() / terms[:, 2].sum()), 1.0)
    s = np.array((mean, 2 * mean, 4 * mean))
    cost = prior(s.astype(np.int64))
    b, a = np.polynomial.polynomial.polyfit(s, cost / s, 1)
    return float(mean * np.clip(b / max(a * mean, 1e-300), 1 / MOST_RATIO, MOST_RATIO))


def _solved(rows: FloatArray, weight: FloatArray, ratio: float, share: FloatArray) -> FloatArray:
    """Coefficients with the best ratio b / a. rows: terms over seconds; weight: of squared errors;
    share: medians of the rows' last two terms.
    """
    gram, right = (rows * weight[:, None]).T @ rows, weight @ rows
    ratios = ratio * RATIOS
    mix = np.zeros((len(ratios), 3, TERMS))
    mix[:, 0, 0], mix[:, 0, 1] = 1.0, ratios
    mix[:, 1, 2] = mix[:, 2, 3] = 1.0
    grams, rights = mix @ gram @ mix.transpose(0, 2, 1), mix @ right
    for at, off in ((1, SAMPLES_OFF), (2, BEGIN_OFF)):
        grams[:, at, at] += (share[at - 1] / off) ** 2
    scale = 1 / np.sqrt(np.einsum("kii->ki", grams))
    grams = grams * scale[:, :, None] * scale[:, None, :] + ALONE * np.eye(3)
    rights = rights * scale
    prior = (np.log(RATIOS) / RATIO_OFF) ** 2
    best, least = np.zeros(TERMS), np.inf
    for chosen in map(list, _SUBSETS):
        own = grams[:, chosen][:, :, chosen]
        x = np.linalg.solve(own, rights[:, chosen, None])[..., 0]
        loss = prior - (x * rights[:, chosen]).sum(axis=1)
        loss[(x < 0).any(axis=1)] = np.inf
        at = int(loss.argmin())
        if loss[at] < least:
            full = np.zeros(3)
            full[chosen] = x[at] * scale[at, chosen]
            least, best = float(loss[at]), full @ mix[at]
    return best
