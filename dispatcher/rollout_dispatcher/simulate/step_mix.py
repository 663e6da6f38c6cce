"""What shares a step: whether steps are like the arrivals, and what that does to weights.

Under `token-mean` a token weighs one over the loss tokens of its step. Where the longest samples
leave together their steps have more of these, so that each of their tokens weighs less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_dispatcher.plan import FloatArray, IntArray

#: The longest hundredth of all samples.
LONGEST = 0.99


@dataclass(frozen=True, slots=True)
class StepMix:
    """Of the counted steps; a sample is long if it is in the longest hundredth of the trace.

    long_weight: what a loss token of a long sample weighs under token-mean, over the mean token's.
    without_long: share of steps without any. work_variation: standard deviation of the steps' work
    over its mean. ks_step: mean Kolmogorov-Smirnov distance of a step's lengths from the trace's.
    """

    long_weight: float
    without_long: float
    work_variation: float
    ks_step: float


def step_mix(trace: IntArray, steps: Sequence[IntArray], work: FloatArray) -> StepMix:
    """trace: tokens of all samples. steps: tokens of each one's. work: of each step, in cost."""
    lengths = np.sort(trace)
    long = lengths[min(int(LONGEST * len(lengths)), len(lengths) - 1)]
    loss = np.array([float((tokens - 1).sum()) for tokens in steps])
    of_long = np.array([float((tokens[tokens >= long] - 1).sum()) for tokens in steps])
    counted = loss > 0
    weight = 1.0
    if of_long.any():
        per_token = float((of_long[counted] / loss[counted]).sum()) / float(of_long.sum())
        weight = per_token * float(loss.sum()) / len(steps)
    mean = float(work.mean())
    return StepMix(
        long_weight=weight,
        without_long=float((of_long == 0).mean()),
        work_variation=float(work.std()) / mean if mean > 0 else 0.0,
        ks_step=float(np.mean([_distance(lengths, tokens) for tokens in steps])),
    )


def _distance(lengths: IntArray, tokens: IntArray) -> float:
    """Kolmogorov-Smirnov distance of tokens from sorted lengths."""
    own = np.sort(tokens)
    whole = np.searchsorted(lengths, own, "right") / len(lengths)
    below = np.searchsorted(lengths, own, "left") / len(lengths)
    at = np.searchsorted(own, own, "right") / len(own)
    before = np.searchsorted(own, own, "left") / len(own)
    return float(max(np.abs(at - whole).max(), np.abs(before - below).max()))
