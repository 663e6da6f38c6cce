"""Selection bias: how far the lengths that leave stray from the lengths of the whole trace.

Measured as the Kolmogorov-Smirnov distance over 20 dispatches, for every 20 consecutive ones
there are, and compared with what chance does anyway: the same distance for the same number of
samples in the order in which they arrived.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rollout_dispatcher.core.totals import LONGEST, StepMix, long_weight
from rollout_planner.types import FloatArray, IntArray

DISPATCHES = 20


def selection_bias(
    trace: IntArray, dispatched: Sequence[IntArray], arrived: IntArray, before: int
) -> tuple[float, float]:
    """Mean distance from the trace's lengths, of what was dispatched and of what arrived.

    trace: tokens of all samples. dispatched: tokens, step by step. arrived: tokens in order of
    arrival, the first `before` of them dispatched by uncounted steps.
    """
    lengths = Lengths(trace)
    sizes = [len(tokens) for tokens in dispatched]
    in_turn = np.split(arrived[before : before + sum(sizes)], np.cumsum(sizes)[:-1])
    ours = [lengths.distance(counts) for counts in _runs(list(map(lengths.counts, dispatched)))]
    by_chance = [lengths.distance(counts) for counts in _runs(list(map(lengths.counts, in_turn)))]
    return float(np.mean(ours)), float(np.mean(by_chance))


class Lengths:
    """The lengths of a trace, and how far others are from them."""

    def __init__(self, trace: IntArray) -> None:
        self._lengths = np.unique(trace)
        self._whole = np.cumsum(self.counts(trace)) / len(trace)

    def counts(self, tokens: IntArray) -> IntArray:
        """How many there are of each length; all are among the trace's."""
        at = np.searchsorted(self._lengths, tokens)
        return np.bincount(at, minlength=len(self._lengths)).astype(np.int64)

    def distance(self, counts: IntArray) -> float:
        """Kolmogorov-Smirnov distance of so many from the trace."""
        return float(np.abs(np.cumsum(counts) / counts.sum() - self._whole).max())


def step_mix(
    trace: IntArray, steps: Sequence[IntArray], work: FloatArray, usual_loss: FloatArray
) -> tuple[StepMix, float]:
    """The mix, and `long_weight` under token-mean-expected.

    trace: tokens of all samples. steps: tokens of each one's. work: of each step, in cost.
    usual_loss: loss tokens of the mean arrival when it was planned.
    """
    lengths, rising = Lengths(trace), np.sort(trace)
    long = rising[min(int((1 - LONGEST) * len(rising)), len(rising) - 1)]
    loss = np.array([float((tokens - 1).sum()) for tokens in steps])
    of_long = np.array([float((tokens[tokens >= long] - 1).sum()) for tokens in steps])
    mix = StepMix.of(
        loss,
        of_long,
        with_long=np.array([bool((tokens >= long).any()) for tokens in steps]),
        work=work,
        distances=np.array([lengths.distance(lengths.counts(tokens)) for tokens in steps]),
    )
    return mix, long_weight(loss, of_long, divided_by=usual_loss * list(map(len, steps)))


def _runs(by_step: Sequence[IntArray]) -> Iterator[IntArray]:
    """Counts over every 20 consecutive steps, or over all if there are fewer."""
    span = min(DISPATCHES, len(by_step))
    within: IntArray = np.stack(by_step[:span]).sum(axis=0)
    yield within
    for added, left in zip(by_step[span:], by_step[:-span], strict=True):
        within = within + added - left
        yield within
