"""What shares a step: whether steps are like the arrivals, and what that does to weights.

Under `token-mean` a token weighs one over the loss tokens of its step. Where the longest samples
leave together their steps have more of these, so that each of their tokens weighs less.
"""

from dataclasses import dataclass
from typing import Self

from rollout_planner.types import BoolArray, FloatArray

#: The longest samples: a hundredth of all.
LONGEST = 0.01


@dataclass(frozen=True, slots=True)
class StepMix:
    """Whether single steps are like the arrivals; a sample is long if it is in the longest 1 %.

    long_weight: what a loss token of a long sample weighs under token-mean, over the mean token's.
    without_long: share of steps without any. work_variation: standard deviation of the steps' work
    over its mean. ks_step: a step's lengths from all arrivals' (Kolmogorov-Smirnov), the mean.
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
        """Of each step: loss tokens, those of long samples, whether it has any, work, distance."""
        mean = float(work.mean())
        return cls(
            long_weight=long_weight(loss, of_long, divided_by=loss),
            without_long=1 - float(with_long.mean()),
            work_variation=float(work.std()) / mean if mean > 0 else 0.0,
            ks_step=float(distances.mean()),
        )


def long_weight(loss: FloatArray, of_long: FloatArray, *, divided_by: FloatArray) -> float:
    """What a loss token of a long sample weighs, over the mean token's; 1 if there is none.

    Of each step: loss tokens, those of long samples, and what its loss is divided by.
    """
    if not of_long.any():
        return 1.0
    divided_by = divided_by.clip(min=1.0)
    of_all = (loss / divided_by).sum() / loss.sum()
    return float((of_long / divided_by).sum() / of_long.sum() / of_all)
