"""Selection bias: how far the lengths that leave stray from the lengths of the whole trace.

Measured as the Kolmogorov-Smirnov distance over 20 dispatches, for every 20 consecutive ones
there are, and compared with what chance does anyway: the same distance for the same number of
samples in the order in which they arrived.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rollout_dispatcher.plan import IntArray

DISPATCHES = 20


def selection_bias(
    trace: IntArray, dispatched: Sequence[IntArray], arrived: IntArray, before: int
) -> tuple[float, float]:
    """Mean distance from the trace's lengths, of what was dispatched and of what arrived.

    trace: tokens of all samples. dispatched: tokens, step by step. arrived: tokens in order of
    arrival, the first `before` of them dispatched by uncounted steps.
    """
    lengths = np.unique(trace)
    whole = np.cumsum(_counts(lengths, trace)) / len(trace)

    def distance(counts: IntArray) -> float:
        return float(np.abs(np.cumsum(counts) / counts.sum() - whole).max())

    sizes = [len(tokens) for tokens in dispatched]
    in_turn = np.split(arrived[before : before + sum(sizes)], np.cumsum(sizes)[:-1])
    ours = [distance(counts) for counts in _runs([_counts(lengths, each) for each in dispatched])]
    by_chance = [distance(counts) for counts in _runs([_counts(lengths, each) for each in in_turn])]
    return float(np.mean(ours)), float(np.mean(by_chance))


def _runs(by_step: Sequence[IntArray]) -> Iterator[IntArray]:
    """Counts over every 20 consecutive steps, or over all if there are fewer."""
    span = min(DISPATCHES, len(by_step))
    within: IntArray = np.stack(by_step[:span]).sum(axis=0)
    yield within
    for added, left in zip(by_step[span:], by_step[:-span], strict=True):
        within = within + added - left
        yield within


def _counts(lengths: IntArray, tokens: IntArray) -> IntArray:
    at = np.searchsorted(lengths, tokens)
    return np.bincount(at, minlength=len(lengths)).astype(np.int64)
