"""Counters of a whole run: they only grow, and continue after a restart.

`LengthCounts`: sample lengths in logarithmic bins. Eight bins an octave keep the error of a
quantile under 9 % with 256 counters, whatever the number of samples. The Kolmogorov-Smirnov
distance of two counts shows how far selection changes the distribution of lengths.

`SelectionBias`: compares the lengths of the samples dispatched lately with those of all candidates:
samples buffered before the first of these dispatches, and arrivals since. Dropped samples are in
the second only, and samples that were passed over come later. A draw of n samples deviates by

    distance <= 1.36 / sqrt(n)    in 95 % of all draws (Kolmogorov's distribution)

so a larger distance is not chance. This holds for independent samples; members of a group are
alike, and chance alone exceeds the bound then.

`StepMix`: compares single steps with the arrivals, and shows the effect on weights. Under
`token-mean` a token weighs one over the loss tokens of its step. If the longest samples leave
together, their steps have more loss tokens, and each of these tokens weighs less.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import sqrt
from typing import Any, Self

import numpy as np

from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.payload import Footprint, Payload, count_references
from rollout_dispatcher.sample import Outcome
from rollout_planner.types import BoolArray, FloatArray, IntArray

BINS_PER_OCTAVE = 8
OCTAVES = 32
#: Powers of two that are shown: to twice the default of the longest sample.
SHOWN = range(4, 22)
#: Lengths are counted so many at a time, or when they are read: a call of numpy is slow.
COUNTED_TOGETHER = 1024
#: The shortest length of each bin, in tokens.
_SHORTEST = np.ceil(np.exp2(np.arange(BINS_PER_OCTAVE * OCTAVES) / BINS_PER_OCTAVE))


class LengthCounts:
    """Numbers of samples by length in tokens."""

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
        """Start from the counts of an earlier process."""
        self._counts, self.samples, self.tokens = np.array(counts), sum(counts), tokens

    def octaves(self) -> list[tuple[int, int]]:
        """Pairs of (2**k, samples shorter than that), for each k of `SHOWN`."""
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


@dataclass(slots=True)
class Totals:
    """Counts of samples or steps.

    received: pushed samples by outcome; refused: by reason. received_bytes: payloads sent with the
    accepted ones. samples_referenced, referenced_bytes: accepted ones in payload stores.
    arrived, dispatched, dropped_lengths: lengths of accepted, planned and dropped samples, in
    tokens; the last follow from the others after a restart.
    small_steps: steps of fewer samples than a dispatch batch. *_rewound: committed before a rewind
    opened them again. steps_not_rewound: trained after the loaded checkpoint, and lost.
    steps_evicted: retained steps evicted before a checkpoint covered them. objects_freed: of
    payload stores. releases_failed: answers of workers that could not delete some.
    """

    received: Counter[Outcome] = field(default_factory=lambda: Counter(dict.fromkeys(Outcome, 0)))
    refused: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    samples_referenced: int = 0
    referenced_bytes: int = 0
    arrived: LengthCounts = field(default_factory=LengthCounts)
    dispatched: LengthCounts = field(default_factory=LengthCounts)
    dropped_lengths: LengthCounts = field(default_factory=LengthCounts)
    planned: Counter[Trigger] = field(default_factory=lambda: Counter(dict.fromkeys(Trigger, 0)))
    dropped: Counter[DropReason] = field(
        default_factory=lambda: Counter(dict.fromkeys(DropReason, 0))
    )
    small_steps: int = 0
    steps_committed: int = 0
    samples_committed: int = 0
    steps_rewound: int = 0
    samples_rewound: int = 0
    steps_not_rewound: int = 0
    steps_evicted: int = 0
    objects_freed: int = 0
    releases_failed: int = 0

    def accepted(
        self, tokens: Sequence[int], payloads: Sequence[Payload], footprint: Footprint
    ) -> None:
        """Count accepted samples. footprint: of all their payloads."""
        self.received[Outcome.ACCEPTED] += len(tokens)
        self.arrived.add(tokens)
        self.received_bytes += footprint.memory
        if footprint.referenced:
            self.samples_referenced += count_references(payloads)
            self.referenced_bytes += footprint.referenced

    def as_json(self) -> dict[str, Any]:
        """All totals as JSON values, for `restore`."""
        return {
            "received": dict(self.received),
            "refused": dict(self.refused),
            "arrived": [self.arrived.counts.tolist(), self.arrived.tokens],
            "dispatched": [self.dispatched.counts.tolist(), self.dispatched.tokens],
            "planned": dict(self.planned),
            "dropped": dict(self.dropped),
        } | {name: getattr(self, name) for name in _PLAIN}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Start from the value of `as_json`, empty in a new journal."""
        if not saved:
            return
        self.received.update({Outcome(key): count for key, count in saved["received"].items()})
        self.refused.update(saved["refused"])
        self.planned.update({Trigger(key): count for key, count in saved["planned"].items()})
        self.dropped.update({DropReason(key): count for key, count in saved["dropped"].items()})
        self.arrived.restore(*saved["arrived"])
        self.dispatched.restore(*saved["dispatched"])
        for name in _PLAIN:
            setattr(self, name, saved.get(name, 0))


#: Names of the plain counters.
_PLAIN = [counter.name for counter in fields(Totals) if counter.type is int]
#: Share of all samples that are the longest.
LONGEST = 0.01


@dataclass(frozen=True, slots=True)
class StepMix:
    """Single steps compared with the arrivals; a sample is long if it is in the longest 1 %.

    long_weight: weight of a long sample's loss token under token-mean, over the mean token's.
    without_long: share of steps without long samples. work_variation: standard deviation of the
    steps' work over its mean. ks_step: mean Kolmogorov-Smirnov distance of a step's lengths from
    those of all arrivals.
    """

    long_weight: float
    without_long: float
    work_variation: float
    ks_step: float

    @classmethod
    def of(
        cls,
        loss: FloatArray,
        of_long: FloatArray,
        *,
        with_long: BoolArray,
        work: FloatArray,
        distances: FloatArray,
    ) -> Self:
        """From columns of steps: loss tokens, those of long samples, work, distance."""
        mean = float(work.mean())
        return cls(
            long_weight=long_weight(loss, of_long, divided_by=loss),
            without_long=1 - float(with_long.mean()),
            work_variation=float(work.std()) / mean if mean > 0 else 0.0,
            ks_step=float(distances.mean()),
        )


def long_weight(loss: FloatArray, of_long: FloatArray, *, divided_by: FloatArray) -> float:
    """Weight of a long sample's loss token over the mean token's; 1 if there is none.

    By step: loss tokens, those of long samples, and the divisor of its loss.
    """
    if not of_long.any():
        return 1.0
    divided_by = divided_by.clip(min=1.0)
    of_all = (loss / divided_by).sum() / loss.sum()
    return float((of_long / divided_by).sum() / of_long.sum() / of_all)


#: Dispatches that are compared together, as in `simulate`.
DISPATCHES = 20
#: Dispatches that are compared one by one: few have any of the longest samples.
SINGLE_DISPATCHES = 100
#: 95 % quantile of Kolmogorov's distribution.
LEVEL = 1.358


class SelectionBias:
    """Compares `totals` of the last dispatches."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        # By each of the last dispatches: samples dispatched before, and these with dropped ones.
        self._left: deque[tuple[IntArray, IntArray]] = deque(maxlen=DISPATCHES + 1)
        self._steps: deque[tuple[IntArray, FloatArray, float]] = deque(maxlen=SINGLE_DISPATCHES)
        self._mark()

    def restore(self, held: LengthCounts) -> None:
        """Start after `Totals.restore`. held: lengths of the buffered samples."""
        totals = self._totals
        gone = totals.arrived.counts - held.counts - totals.dispatched.counts
        totals.dropped_lengths.restore(gone.tolist(), 0)
        self._left.clear()
        self._mark()

    def dispatched(self, tokens: IntArray, loss_tokens: IntArray, work: float) -> None:
        """Add a planned step that `totals` count. work: in cost."""
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
        """The mix of the last dispatches; None while there is none."""
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
        """Bound of `distance` by chance, in 95 % of draws; 1 while nothing was dispatched."""
        samples = int((self._totals.dispatched.counts - self._left[0][0]).sum())
        return min(1.0, LEVEL / sqrt(samples)) if samples else 1.0
