"""What a simulation found, as plain numbers: the seam between running and reporting.

Ratios are plain (0.01 is 1 %), times are seconds unless the name says otherwise, delays
are in dispatches.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rollout_dispatcher.core.totals import StepMix

FORMAT = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in four numbers."""

    mean: float
    median: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Timing:
    """What became of rank time, in shares of `elapsed` that sum to 1, and of samples meanwhile.

    elapsed: from the beginning of the first step to the end of the last. finished: its end, from
    the first arrival. wait: seconds from a sample's arrival to the plan that took it.
    """

    elapsed: float
    finished: float
    busy: float
    waiting_for_data: float
    waiting_for_stragglers: float
    wait: Spread


@dataclass(frozen=True, slots=True)
class Run:
    """One row of the table: a strategy at a window multiple.

    excess: straggler excess, ratio of sums over the counted steps; step_excess: per step.
    lower_bound: no split could be below.
    padding: cost of padding over the samples' own. ks: Kolmogorov-Smirnov distance of the lengths
    in 20 dispatches from the trace's; ks_fifo: that of as many samples in the order they arrived.
    delays[k]: samples dispatched after k dispatches had passed them over. long_weight_expected: as
    the mix has it, under token-mean-expected. cost_errors: excess of the same plans if the linear
    part of the cost were so many times as large.
    """

    strategy: str
    window: float
    steps: int
    warm_up_steps: int
    samples: int
    excess: float
    step_excess: Spread
    imbalance: float
    lower_bound: float
    padding: float
    delay: Spread
    delays: list[int]
    small_steps: int
    dropped: dict[str, int]
    triggers: dict[str, int]
    ks: float
    ks_fifo: float
    mix: StepMix
    plan_ms: float
    timing: Timing | None = None
    long_weight_expected: float | None = None
    cost_errors: dict[str, float] = field(default_factory=dict)

    @property
    def time(self) -> float:
        """Trainer time over what the samples alone would take if no rank ever waited."""
        waiting = 1 / self.timing.busy if self.timing else 1 + self.excess
        return waiting * (1 + self.padding)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What was replayed."""

    name: str
    samples: int
    empty_rows: int
    tokens: Spread


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The window that is worth its delay."""

    window: float
    why: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """How a recorded run went by itself. run: as it was planned, under its own settings.

    began: its first step, in seconds since 1970. measured: straggler excess of what ranks computed,
    None where they do not tell; measured_steps: of so many steps.
    """

    run: Run
    began: float
    measured: float | None
    measured_steps: int


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that a report shows; options: as they would be written on the command line.

    recorded: the run that was replayed, if one was.
    """

    trace: TraceSummary
    options: dict[str, Any]
    runs: list[Run]
    recommendation: Recommendation | None = None
    recorded: Recorded | None = None

    def to_json(self) -> str:
        """One JSON object, indented two levels deep at most where lists are long."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1)
