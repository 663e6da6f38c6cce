"""What was measured, as a snapshot: for metrics, and for people in /statusz."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_dispatcher.core.effects import StepMeasured
from rollout_dispatcher.core.measuring.cost_in_use import CostStatistics
from rollout_dispatcher.core.measuring.times import Unmeasured
from rollout_planner.types import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredStatistics:
    """Of a whole run, unless it says otherwise.

    why: in words, why nothing is told of the last steps; empty while it is. steps: passes over
    steps that were measured; unmeasured: those that were not, by reason. last: the last pass that
    a step was judged by, of this generation. slowness: float64[R], nan where nothing can be told;
    in_plans: what plans go by of it, None while that is 1 of each.
    totals: by pass, what each rank computed and waited: float64[2, R]. transport: by pass, what
    every rank was inside collectives besides. All in seconds.
    """

    why: str
    steps: int
    unmeasured: Mapping[Unmeasured, int]
    last: StepMeasured | None
    slowness: FloatArray
    in_plans: tuple[float, ...] | None
    cost: CostStatistics
    totals: Mapping[str, FloatArray]
    transport: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """For people: times in seconds; the last measured step by rank."""
        return {
            "why_not": self.why,
            "measured_steps": self.steps,
            "unmeasured_steps": dict(self.unmeasured),
            "cost": self.cost.as_json(),
            "slowness_in_plans": self.in_plans or "no rank is surely slower than others",
            "last_step": None if self.last is None else self._step(self.last),
        }

    def _step(self, last: StepMeasured) -> dict[str, Any]:
        computed, waited = last.split.of_ranks
        transport = last.split.transport_s
        columns = {
            "compute_s": computed,
            "wait_s": waited,
            "collective_s": waited + transport,
            "slowness": self.slowness,
        }
        ranks = [
            {"dp_rank": at} | {name: _number(column[at]) for name, column in columns.items()}
            for at in range(len(computed))
        ]
        return {
            "step": last.step,
            "cost_key": last.cost_key,
            "lost_share": _number(last.lost),
            "straggler_excess": _number(last.excess),
            "imbalance": _number(last.imbalance),
            "transport_s": _number(transport),
            "ranks": ranks,
        }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 6)
