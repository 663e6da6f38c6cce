"""The result of a simulation, as plain numbers, for the table and for JSON.

Ratios are plain (0.01 is 1 %), times are in seconds unless the name says otherwise, delays in
dispatches.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from rollout_dispatcher.core.totals import StepMix
from rollout_planner.types import FloatArray, IntArray

FORMAT = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in four numbers; zeros for no values."""

    mean: float
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: IntArray | FloatArray | list[float]) -> Self:
        """Summarise values."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        median, p99 = np.percentile(values, (50, 99))
        return cls(float(np.mean(values)), float(median), float(p99), float(np.max(values)))


@dataclass(frozen=True, slots=True)
class RankTime:
    """Rank time by cause, in shares of `elapsed` that sum to 1, and how long samples waited.

    elapsed: from the beginning of the first step to the end of the last. finished: that end, from
    the first arrival. wait: seconds from a sample's arrival to its plan.
    """

    elapsed: float
    finished: float
    busy: float
    waiting_for_data: float
    waiting_for_stragglers: float
    wait: Spread

    @classmethod
    def of(
        cls,
        elapsed: float,
        finished: float,
        of_data: float,
        of_stragglers: float,
        waits: list[float],
    ) -> Self:
        """of_data, of_stragglers: seconds of the mean rank. waits: of each dispatched sample."""
        data, stragglers = of_data / (elapsed or 1.0), of_stragglers / (elapsed or 1.0)
        busy = 1 - data - stragglers
        return cls(elapsed, finished, busy, data, stragglers, Spread.of(waits))


@dataclass(frozen=True, slots=True)
class Run:
    """One row of the table: a strategy at a window multiple.

    excess: straggler excess, ratio of sums over the counted steps; step_excess: per step.
    lower_bound: of the excess of any split. padding: cost of padding over the samples' own. ks:
    Kolmogorov-Smirnov distance of the lengths in 20 dispatches from the trace's; ks_fifo: that of
    as many samples in order of arrival. delays[k]: samples that k dispatches passed over.
    long_weight_expected: `mix.long_weight` under token-mean-expected. cost_errors: by factor,
    excess of the same plans if the linear part of the cost were that many times as large.
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
    timing: RankTime | None = None
    long_weight_expected: float | None = None
    cost_errors: dict[str, float] = field(default_factory=dict)

    @property
    def time(self) -> float:
        """Trainer time over that of the samples alone on ranks that never wait."""
        waiting = 1 / self.timing.busy if self.timing else 1 + self.excess
        return waiting * (1 + self.padding)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The trace that was replayed."""

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
    """A recorded run as it was planned, under its own settings.

    began: its first step, in seconds since 1970. measured: straggler excess of measured compute
    times, over `measured_steps` steps; None if ranks reported none.
    """

    run: Run
    began: float
    measured: float | None
    measured_steps: int


@dataclass(frozen=True, slots=True)
class Result:
    """All that is shown. options: as on the command line. recorded: the run of a record, if any."""

    trace: TraceSummary
    options: dict[str, Any]
    runs: list[Run]
    recommendation: Recommendation | None = None
    recorded: Recorded | None = None

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1)
