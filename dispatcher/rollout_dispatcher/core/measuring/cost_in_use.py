"""The cost of samples and the speeds of ranks in plans, adapted to measured micro-batches.

    the prior   until a fit has predicted later micro-batches better, by more than chance; if costs
                do not adapt, always
    a fit       until a newer one has

A fit that is surely better than the cost in use shows longer waits in the plans made with that cost
than they estimated: the difference is the loss of the cost in use.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from rollout_dispatcher.core.effects import CostChanged
from rollout_dispatcher.core.facts import CostFitted, SpeedsMeasured
from rollout_dispatcher.core.measuring.fit import (
    REMEMBERED,
    TERMS,
    Fit,
    fit_cost,
    improbability,
    median,
    terms_of,
)
from rollout_planner.cost import Quadratic
from rollout_planner.cost import tokens as per_token
from rollout_planner.types import (
    CostModel,
    FloatArray,
    IntArray,
    Sync,
    computed_lengths,
    straggler_excess,
    summed,
)

#: Log odds at which a fit replaces the prior, and an older fit; and their bound. A newer fit has
#: more data than an older one: the same odds for both cost 0.2 points of excess at 8 % noise.
SURE, SURE_OF_NEWER, SUREST = 6.0, 1.0, 12.0
#: Micro-batches that are compared with each other, at least.
COMPARED = 8
#: Fitted again once 1/8 more observations are known.
REFIT = 8
#: Rounds in which the slowest of several micro-batches is found by the last fit.
RIVAL_ROUNDS = 3
#: A rank of larger slowness is slow whatever its work costs; nan is not.
SLOW = 1.15
#: Steps whose plans are judged, and the smallest loss that is reported, as a share of ranks' time.
JUDGED_STEPS, LEAST_REPORTED_LOSS = 16, 0.01


@dataclass(frozen=True, slots=True)
class CostConfig:
    """prior: cost of samples before a fit. adapts: whether a better fit replaces it, or only judges
    it. padded: each sample takes the computation of the longest in its micro-batch; multiple: and
    is rounded up to a multiple of so many tokens.
    """

    prior: CostModel = per_token
    adapts: bool = False
    padded: bool = False
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class CostStatistics:
    """in_use: the fit in plans; None: the prior. newest: the last fit, None before the first;
    error: its typical relative deviation. promised: mean estimated excess of the last plans; loss:
    share of the ranks' time that they lose beyond it, by the newest fit, None if not known.
    """

    in_use: CostFitted | None = None
    newest: Quadratic | None = None
    error: float | None = None
    promised: float = 0.0
    loss: float | None = None

    @property
    def warning(self) -> str:
        """Advice for an operator, empty for none."""
        if self.loss is None or self.loss < LEAST_REPORTED_LOSS:
            return ""
        return (
            f"plans promised to lose {self.promised / (1 + self.promised):.1%} of the ranks' time, "
            f"and the cost that they balance loses {self.loss:.1%} besides; {self.newest} was "
            "fitted to what micro-batches take (--cost auto uses it)"
        )

    def as_json(self) -> dict[str, Any]:
        """For people."""
        used = self.in_use
        return {
            "version": 0 if used is None else used.version,
            "in_use": None if used is None else str(used.cost),
            "since_step": None if used is None else used.first_step,
            "fitted": None if self.newest is None else str(self.newest),
            "error": self.error,
            "loss": self.loss,
        }


class Work(NamedTuple):
    """terms: float64[R, M, 4], of each micro-batch; prior: float64[R, M], its cost by the prior."""

    terms: FloatArray
    prior: FloatArray


class Timing(NamedTuple):
    """A measured step. planned, compute: float64[R, M], estimated time, and seconds.
    planned_slowness, slowness: float64[R], of ranks in the plan, and as measured (nan: not known).

    waited: `compute` includes waits for other ranks, so that it is the slowest rank's for all.
    """

    work: Work
    planned: FloatArray
    compute: FloatArray
    planned_slowness: FloatArray
    slowness: FloatArray
    sync: Sync
    waited: bool = False


class _Seen(NamedTuple):
    """Observations: seconds, float64[n], of the slowest of K micro-batches; K is 1 if ranks
    separate waits. terms: float64[n, K, 4]; prior: float64[n, K], cost by the prior.
    """

    terms: FloatArray
    prior: FloatArray
    seconds: FloatArray

    def slowest(self, fit: FloatArray | None) -> tuple[FloatArray, FloatArray]:
        """Terms, float64[n, 4], and prior of the slowest, by a fit's coefficients or the prior."""
        if self.prior.shape[1] == 1:
            return self.terms[:, 0], self.prior[:, 0]
        cost = self.prior if fit is None else self.terms @ fit
        at = np.arange(len(cost)), cost.argmax(axis=1)
        return self.terms[at], self.prior[at]


class CostInUse:
    """Observations of micro-batches, and the cost in plans."""

    def __init__(self, config: CostConfig) -> None:
        self._config = config
        self._seen: deque[_Seen] = deque()
        self._unseen: list[_Seen] = []
        self._count = self._unfitted = 0
        self._newest: Fit | None = None
        #: Seconds for a unit of the cost in use, and for a micro-batch, over all observations.
        self._pace = 0.0, 0.0
        self._better = 0.0
        #: Last plans: terms by slowness, float64[R, M, 4]; estimated excess; sync.
        self._plans: deque[tuple[FloatArray, float, Sync]] = deque(maxlen=JUDGED_STEPS)
        self.fitted: CostFitted | None = None
        self.speeds: SpeedsMeasured | None = None

    @property
    def adapts(self) -> bool:
        """Whether a better fit replaces the prior."""
        return self._config.adapts

    @property
    def fitted_cost(self) -> Quadratic | None:
        """The fitted cost in plans; None: the prior."""
        return None if self.fitted is None else self.fitted.cost

    def slowness(self, generation: int) -> tuple[float, ...] | None:
        """Slowness of this generation's DP ranks in plans; None: they are equally fast."""
        speeds = self.speeds
        if speeds is None or speeds.generation != generation or set(speeds.slowness) == {1.0}:
            return None
        return speeds.slowness

    def restore(self, fitted: CostFitted | None, speeds: SpeedsMeasured | None) -> None:
        """Continue with the cost and speeds of an earlier process."""
        if self._config.adapts:
            self.fitted, self.speeds = fitted, speeds

    def measured(self, step: Timing, next_step: int) -> CostChanged | None:
        """Add a measured step; returns the cost in use from `next_step` on if it has changed."""
        slow = step.planned_slowness[:, None, None]
        promised = straggler_excess(step.planned, step.sync)
        self._plans.append((step.work.terms * slow, promised, step.sync))
        seen = _observe(step)
        if not len(seen.seconds):
            return None
        self._unseen.append(seen)
        count = sum(len(each.seconds) for each in self._unseen)
        if count < COMPARED:
            return None
        self._compare(self._unseen)
        self._seen += self._unseen
        self._unseen = []
        self._count += count
        self._unfitted += count
        while self._count - len(self._seen[0].seconds) >= REMEMBERED:
            self._count -= len(self._seen.popleft().seconds)
        news = None
        sure = SURE if self.fitted is None else SURE_OF_NEWER
        if self._config.adapts and self._better > sure:
            news = self._take(next_step)
        if self._count > TERMS and self._unfitted * REFIT > self._count:
            self._fit()
        return news

    def work(self, tokens: IntArray, counts: IntArray) -> Work:
        """Work of micro-batches. tokens: int64[n], rank by rank; counts: int64[R, M], samples."""
        config = self._config
        s = computed_lengths(tokens, counts, padded=config.padded, multiple=config.multiple)
        return Work(terms_of(s, counts), summed(config.prior(s), counts))

    def seconds(self, work: Work) -> FloatArray | None:
        """Time of the work by the newest fit, float64[R, M]; None before a fit."""
        if self._newest is None:
            return None
        found: FloatArray = work.terms @ self._newest.coefficients
        return found

    def _compare(self, unseen: list[_Seen]) -> None:
        """Compare the newest fit with the cost in use, on micro-batches new to both.

        Only their ratios count, so a slower machine changes nothing.
        """
        if self._newest is None:
            return
        (unit, begin), fit = self._pace, self._newest.coefficients
        seconds = np.concatenate([seen.seconds for seen in unseen])
        cost = np.concatenate([self._cost_of(seen) for seen in unseen])
        of_use = (unit * cost + begin) / seconds
        of_fit = np.concatenate([(seen.terms @ fit).max(axis=1) for seen in unseen]) / seconds
        used, fitted = (
            improbability(share / median(share) - 1, self._newest.error)
            for share in (of_use, of_fit)
        )
        self._better = min(max(self._better + used - fitted, 0.0), SUREST)

    def _cost_of(self, seen: _Seen) -> FloatArray:
        """Cost in use without its constant; float64[n]."""
        cost = seen.prior
        if self.fitted is not None:
            used = self.fitted.cost
            cost = seen.terms[..., :3] @ np.array((used.a, used.b, used.c))
        found: FloatArray = cost.max(axis=1)
        return found

    def _fit(self) -> None:
        self._unfitted, joined = 0, _joined(self._seen)
        seconds = np.concatenate([seen.seconds for seen in joined])
        for _ in range(1 + RIVAL_ROUNDS * any(seen.prior.shape[1] > 1 for seen in joined)):
            known = None if self._newest is None else self._newest.coefficients
            terms = np.concatenate([seen.slowest(known)[0] for seen in joined])
            self._newest = fit_cost(terms, seconds, self._config.prior)
        self._pace = _pace(np.concatenate([self._cost_of(seen) for seen in joined]), seconds)

    def _take(self, next_step: int) -> CostChanged:
        """Use the newest fit, in the unit of the prior."""
        assert self._newest is not None
        fit = self._newest.coefficients
        joined = _joined(self._seen)
        prior = sum(float(seen.slowest(fit)[1].sum()) for seen in joined)
        seconds = sum(float(seen.seconds.sum()) for seen in joined)
        version = 1 if self.fitted is None else self.fitted.version + 1
        cost = Quadratic(*(fit * (prior / seconds)).tolist())
        self.fitted = CostFitted(version, cost, self._newest.error, next_step)
        self._better = 0.0
        return CostChanged(self.fitted, self._loss(self._newest))

    def _loss(self, fit: Fit) -> float:
        """Share of the ranks' time that plans lose beyond their estimates, by a fit."""
        cost = fit.coefficients[:3]
        excess = [
            (straggler_excess(terms[..., :3] @ cost, sync), promised)
            for terms, promised, sync in self._plans
        ]
        by_fit, promised = (1 + sum(column) / len(excess) for column in zip(*excess, strict=True))
        return float(max(0.0, 1 - promised / by_fit))

    def statistics(self) -> CostStatistics:
        """A frozen snapshot."""
        fit = self._newest
        if fit is None:
            return CostStatistics(self.fitted)
        loss = self._loss(fit) if self._better > SURE else 0.0
        promised = float(np.mean([promised for _, promised, _ in self._plans]))
        unit = fit.coefficients[0] or fit.coefficients[1]
        newest = Quadratic(*(fit.coefficients / unit).tolist())
        return CostStatistics(self.fitted, newest, fit.error, promised, loss)


def _joined(seen: Iterable[_Seen]) -> list[_Seen]:
    """Return the observations in order, those with equally many rivals joined into one."""
    return [
        _Seen(*map(np.concatenate, zip(*alike, strict=True)))
        for _, alike in groupby(seen, lambda each: each.prior.shape[1])
    ]


def _observe(step: Timing) -> _Seen:
    """The observations of a step.

    Ranks that take a step's micro-batches at once report its time with the first of them.
    """
    terms, prior = step.work
    seconds = step.compute / np.where(step.slowness > SLOW, step.slowness, 1.0)[:, None]
    if bool(np.any((seconds == 0) & (terms[..., 2] > 0))):
        terms, prior, seconds = (
            each.sum(axis=1, keepdims=True) for each in (terms, prior, seconds)
        )
    if step.waited:
        terms, prior = terms.swapaxes(0, 1), prior.T
        seconds = np.where(seconds.min(axis=0) > 0, median(seconds), 0.0)
    else:
        terms, prior = terms.reshape(-1, 1, TERMS), prior.reshape(-1, 1)
        seconds = seconds.ravel()
    known = (seconds > 0) & (terms[..., 1].max(axis=1) > 0)
    return _Seen(terms[known], prior[known], seconds[known])


def _pace(cost: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Seconds for a unit of cost and for a micro-batch, robustly; none is negative."""
    rows = np.stack((cost, np.ones(len(cost))), axis=1) / seconds[:, None]
    weight, unit, begin = np.ones(len(rows)), 0.0, 0.0
    for _ in range(2):
        unit, begin = np.linalg.lstsq(rows * weight[:, None], weight, rcond=None)[0].tolist()
        if begin < 0 or unit <= 0:
            unit, begin = float(median(seconds / cost)), 0.0
        off = np.abs(rows @ (unit, begin) - 1)
        weight = np.minimum(1.0, median(off) / np.maximum(off, 1e-12)) ** 0.5
    return unit, begin
