"""What the demo trains on: real lengths scaled to a small model, and how many of them.

The cost model that the dispatcher is given is fitted to what samples cost on this machine, and
the number of steps follows from it, so that a slow machine does not take longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_dispatcher.simulate.profiles import sample_lengths
from rollout_planner.cost import Quadratic

RANKS = 2
#: Eight samples a rank and step, two at a time: what ranks get differs a lot, steps are short.
BATCH = 16
MICRO_BATCH = 2
WINDOW_MULTIPLE = 1.5
#: Mean tokens of a sample after scaling; the longest of a heavy tail are six or seven times that.
MEAN_TOKENS = 1000
#: Fewer steps prove nothing, more do not prove more.
STEPS_BETWEEN = (20, 200)


@dataclass(frozen=True, slots=True)
class Timings:
    """Least processor seconds to train on one sample, by its tokens.

    slowdown: wall clock over processor time, more than 1 on a machine that others use too.
    """

    lengths: Sequence[int]
    seconds: Sequence[float]
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """The samples of a run; `lengths` in the order in which producers push them."""

    profile: str
    seed: int
    lengths: list[int]
    batch: int
    cost: str

    @property
    def steps(self) -> int:
        """Steps that these samples make."""
        return len(self.lengths) // self.batch

    def summary(self) -> dict[str, object]:
        """What demo.json tells of it."""
        return {
            "profile": self.profile,
            "seed": self.seed,
            "steps": self.steps,
            "samples": len(self.lengths),
            "tokens": sum(self.lengths),
            "ranks": RANKS,
            "dispatch_batch_size": self.batch,
            "window_multiple": WINDOW_MULTIPLE,
            "cost": self.cost,
        }


def make_load(profile: str, seed: int, seconds: float, timings: Timings) -> Load:
    """As many whole steps as train in about `seconds`, going by `timings`."""
    cost = fit(timings)
    drawn = sample_lengths(profile, STEPS_BETWEEN[1] * BATCH, np.random.default_rng(seed))
    scaled = np.rint(drawn * (MEAN_TOKENS / drawn.mean())).astype(np.int64)
    lengths = np.maximum(scaled, 2)  # a prompt and an answer
    a_step = float(cost(lengths).mean()) * BATCH / RANKS * timings.slowdown
    steps = int(np.clip(round(seconds / a_step), *STEPS_BETWEEN))
    text = f"quadratic:{cost.a:.4g},{cost.b:.4g},{cost.c:.4g}"
    return Load(profile, seed, lengths[: steps * BATCH].tolist(), BATCH, text)


def fit(timings: Timings) -> Quadratic:
    """The a*s*s + b*s + d, none of them negative, of the least relative errors."""
    s = np.array(timings.lengths, dtype=np.float64)
    t = np.array(timings.seconds, dtype=np.float64)
    terms = np.stack([s * s, s, np.ones_like(s)], axis=1) / t[:, None]
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, used], np.ones_like(t), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))  # a coefficient that wants to be negative is zero
    coefficients = dict.fromkeys(range(3), 0.0) | dict(zip(used, found.tolist(), strict=True))
    return Quadratic(*coefficients.values())
