"""The cost of samples, fitted to what micro-batches took.

A micro-batch of samples of s tokens takes  a * sum s^2 + b * sum s + c * n + d  seconds (a padded
one as what is computed: n times its longest). Well balanced micro-batches are alike and tell little
of how the terms compare, so what was believed before decides as far as they do not: b / a within a
factor of e or so of its value, c and d small shares of the time, each as a normal distribution, and
the fit is the most probable of all. Errors are relative; a few that are far off, as of a garbage
collection or a checkpoint, hardly count (Huber 1964).

Invariant: the same observations give the same fit; none of the four is negative.
"""

from collections import deque
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rollout_planner.types import CostModel, FloatArray, IntArray

#: Terms of the model: sum of squares, sum, count, one.
TERMS = 4
#: Micro-batches that a fit is over, at most; what one weighs still when as many have come since.
REMEMBERED, KEPT_WEIGHT = 4096, 0.1
#: How far off beliefs are, as a rule: the logarithm of b / a, and what c and d are of the time.
RATIO_OFF, SAMPLES_OFF, BEGIN_OFF = 1.0, 0.003, 0.05
#: Ratios b / a that are tried, over the believed one.
RATIOS = np.exp(np.linspace(-4, 4, 161))
#: How much better a fit has to have predicted before it is used, as a logarithm of the odds.
SURE = 6.0
#: Rounds of weights, and from where on a deviation counts linearly, in typical deviations.
ROUNDS, FAR = 4, 1.5
#: Added to equations that are one and the same, so that they can be solved.
ALONE = 1e-9
#: Typical relative deviation at least, and before anything is known of it.
LEAST_ERROR, ERROR = 0.005, 0.05


def terms_of(tokens: IntArray, counts: IntArray, *, padded: bool = False) -> FloatArray:
    """float64[micro-batches, 4], of samples that follow each other; counts: of each, some of 0."""
    which = np.repeat(np.arange(len(counts)), counts)
    s = tokens.astype(np.float64)
    if padded:
        longest = np.zeros(len(counts))
        np.maximum.at(longest, which, s)
        s = longest[which]
    sums = [np.bincount(which, weights=w, minlength=len(counts)) for w in (s * s, s)]
    return np.stack([*sums, counts.astype(np.float64), np.ones(len(counts))], axis=1)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Seconds: a * sum s^2 + b * sum s + c * n + d. error: typical relative deviation from it."""

    a: float
    b: float
    c: float
    d: float
    error: float = np.nan

    def __call__(self, tokens: IntArray) -> FloatArray:
        """Cost of a sample without what it costs to begin its micro-batch, float64[n]."""
        s = np.asarray(tokens).astype(np.float64)
        cost: FloatArray = (self.a * s + self.b) * s + self.c
        return cost

    def seconds(self, terms: FloatArray) -> FloatArray:
        """What micro-batches of these terms take, float64[n]."""
        found: FloatArray = terms @ np.array((self.a, self.b, self.c, self.d))
        return found


class CostFit:
    """Observations of micro-batches, and the cost in use: what was believed, until a fit is better.

    A fit takes the place of the cost in use once it has predicted later micro-batches better by so
    much that it is no chance. believed: cost until then. version: how often that has happened.
    """

    def __init__(self, believed: CostModel) -> None:
        self._believed = believed
        self._seen: deque[tuple[FloatArray, FloatArray, FloatArray]] = deque()
        self._count = 0
        self._newest: Fitted | None = None
        self._better = 0.0
        self.in_use: Fitted | None = None
        self.version = 0

    @property
    def cost(self) -> CostModel:
        """In use."""
        return self.in_use or self._believed

    def note(self, terms: FloatArray, believed: FloatArray, seconds: FloatArray) -> None:
        """Micro-batches of a step: float64[n, 4], their believed cost, and what each took.

        Those that took 0 are not known.
        """
        known = seconds > 0
        terms, believed, seconds = terms[known], believed[known], seconds[known]
        self._compare(terms, believed, seconds)
        self._seen.append((terms, believed, seconds))
        self._count += len(seconds)
        while self._count - len(self._seen[0][2]) >= REMEMBERED:
            self._count -= len(self._seen.popleft()[2])
        if self._count > TERMS:
            self._newest = self._fit()

    def _compare(self, terms: FloatArray, believed: FloatArray, seconds: FloatArray) -> None:
        """Micro-batches that neither the newest fit nor the cost in use has seen."""
        newest = self._newest
        if newest is None:
            return
        shares = [self._predicted(terms, believed) / seconds, newest.seconds(terms) / seconds]
        used, fit = (_far(share / np.median(share) - 1, newest.error) for share in shares)
        self._better = max(self._better + used - fit, 0.0)
        if self._better > SURE:
            self.in_use, self.version, self._better = newest, self.version + 1, 0.0

    def _predicted(self, terms: FloatArray, believed: FloatArray) -> FloatArray:
        """By the cost in use; to what was believed a beginning of micro-batches is added."""
        if self.in_use is not None:
            return self.in_use.seconds(terms)
        _, old, seconds = (np.concatenate(each) for each in zip(*self._seen, strict=True))
        rows = np.stack((old, np.ones(len(old))), axis=1) / seconds[:, None]
        weight = np.ones(len(rows))
        for _ in range(2):
            k, d = np.linalg.lstsq(rows * weight[:, None], weight, rcond=None)[0]
            if d < 0 or k <= 0:
                k, d = np.median(seconds / old), 0.0
            off = np.abs(rows @ (k, d) - 1)
            weight = np.minimum(1.0, np.median(off) / np.maximum(off, 1e-12)) ** 0.5
        return np.asarray(k * believed + d)

    def _fit(self) -> Fitted:
        """The most probable four."""
        terms, _, seconds = (np.concatenate(each) for each in zip(*self._seen, strict=True))
        rows = terms / seconds[:, None]
        kept = KEPT_WEIGHT ** (np.arange(len(rows))[::-1] / REMEMBERED)
        ratio = self._believed_ratio(terms)
        fit, robust, error = np.zeros(TERMS), np.ones(len(rows)), ERROR
        for _ in range(ROUNDS):
            fit = _most_probable(rows, kept * robust / error**2, ratio)
            off = np.abs(rows @ fit - 1)
            error = max(float(np.median(off)) / 0.6745, LEAST_ERROR)
            robust = np.minimum(1.0, FAR * error / np.maximum(off, 1e-12))
        a, b, c, d = fit.tolist()
        return Fitted(a, b, c, d, error)

    def _believed_ratio(self, terms: FloatArray) -> float:
        """B / a of what was believed, at lengths from the mean to some times it."""
        mean = max(float(terms[:, 1].sum() / terms[:, 2].sum()), 1.0)
        s = np.array((mean, 2 * mean, 4 * mean))
        cost = self._believed(s.astype(np.int64))
        b, a = np.polynomial.polynomial.polyfit(s, cost / s, 1)
        return float(max(b, 1e-9 * mean * a) / max(a, 1e-6 * b / mean))


def _far(off: FloatArray, error: float) -> float:
    """How improbable such relative deviations are, as a sum (Huber's loss)."""
    size = np.abs(off) / error
    return float(np.where(size <= FAR, size**2 / 2, FAR * (size - FAR / 2)).sum())


def _most_probable(rows: FloatArray, weight: FloatArray, ratio: float) -> FloatArray:
    """The best of all ratios b / a; rows: terms over seconds, weight: of the squares of errors."""
    gram, right = (rows * weight[:, None]).T @ rows, weight @ rows
    share = np.median(rows, axis=0)
    ratios = ratio * RATIOS
    mix = np.zeros((len(ratios), 3, TERMS))
    mix[:, 0, 0], mix[:, 0, 1] = 1.0, ratios
    mix[:, 1, 2] = mix[:, 2, 3] = 1.0
    grams, rights = mix @ gram @ mix.transpose(0, 2, 1), mix @ right
    for at, column, off in ((1, 2, SAMPLES_OFF), (2, 3, BEGIN_OFF)):
        grams[:, at, at] += (share[column] / off) ** 2
    scale = 1 / np.sqrt(np.einsum("kii->ki", grams))
    grams = grams * scale[:, :, None] * scale[:, None, :] + ALONE * np.eye(3)
    rights = rights * scale
    prior = (np.log(RATIOS) / RATIO_OFF) ** 2
    best, least = np.zeros(TERMS), np.inf
    for chosen in (list(own) for size in (3, 2, 1) for own in combinations(range(3), size)):
        own = np.ix_(range(len(ratios)), chosen, chosen)
        x = np.linalg.solve(grams[own], rights[:, chosen, None])[..., 0]
        loss = prior - (x * rights[:, chosen]).sum(axis=1)
        loss[(x < 0).any(axis=1)] = np.inf
        at = int(loss.argmin())
        if loss[at] < least:
            full = np.zeros(3)
            full[chosen] = x[at] * scale[at, chosen]
            least, best = float(loss[at]), full @ mix[at]
    return best
