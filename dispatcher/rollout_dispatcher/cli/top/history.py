"""What readings of one process add up to: rates of late, and how steps went over time.

Counters begin anew with a process, so history does too. Bounded: readings of the last half minute,
and as many points as the widest terminal shows.
"""

from collections import deque
from dataclasses import dataclass, field

from rollout_dispatcher.cli.top.reading import STAGES, Reading

#: Rates are taken over so many seconds: long enough to be calm, short enough to follow.
RATE_SECONDS = 30.0
_MAX_READINGS = 300
_MAX_POINTS = 512


@dataclass(frozen=True, slots=True)
class Loss:
    """Means of `count` steps. lately: of the last seconds, else of all since the process began."""

    excess: float
    imbalance: float
    count: int
    lately: bool

    @property
    def share(self) -> float:
        """Of the ranks' time, what is lost."""
        return self.excess / (1 + self.excess)


@dataclass
class History:
    """readings: of late, of one process. points: imbalance by stage, one for each new step."""

    readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=_MAX_READINGS))
    points: dict[str, deque[float]] = field(
        default_factory=lambda: {stage: deque(maxlen=_MAX_POINTS) for stage in STAGES}
    )

    @property
    def last(self) -> Reading:
        """The newest reading; there has to be one."""
        return self.readings[-1]

    @property
    def seconds(self) -> float:
        """Over how long rates are."""
        return self.readings[-1].at - self.readings[0].at

    def add(self, reading: Reading) -> None:
        """Take one more; that of another process begins a new history."""
        if self.readings and self.last.process != reading.process:
            self.readings.clear()
            for points in self.points.values():
                points.clear()
        for stage in STAGES:
            before = self.readings[-1] if self.readings else None
            value = _mean("step_imbalance_ratio", stage, before, reading)
            if value is not None:
                self.points[stage].append(value)
        self.readings.append(reading)
        while len(self.readings) > 2 and self.readings[1].at <= reading.at - RATE_SECONDS:
            self.readings.popleft()

    def rate(self, name: str) -> float | None:
        """A count of /statusz a second; None while there is one reading."""
        if self.seconds <= 0:
            return None
        gained = self.last.status[name] - self.readings[0].status[name]
        return float(gained) / self.seconds

    def shares(self, name: str) -> dict[int, float]:
        """Seconds a second, by DP rank, of a counter of seconds."""
        if self.seconds <= 0:
            return {}
        before = self.readings[0].by_rank(name)
        return {
            at: max(0.0, value - before.get(at, 0.0)) / self.seconds
            for at, value in self.last.by_rank(name).items()
        }

    def loss(self, stage: str) -> Loss | None:
        """What steps lost; None where nothing is told."""
        first, count = self.readings[0], "step_straggler_excess_ratio_count"
        lately = self.last.value(count, stage) > first.value(count, stage)
        since = first if lately else None
        excess = _mean("step_straggler_excess_ratio", stage, since, self.last)
        imbalance = _mean("step_imbalance_ratio", stage, since, self.last)
        if excess is None or imbalance is None:
            return None
        steps = self.last.value(count, stage) - (since.value(count, stage) if since else 0)
        return Loss(excess, imbalance, int(steps), lately)

    def staleness(self) -> float | None:
        """Policy versions, the mean of the samples planned of late, else of all."""
        name = "sample_staleness_versions"
        lately = _mean(name, None, self.readings[0], self.last)
        return _mean(name, None, None, self.last) if lately is None else lately


def _mean(name: str, stage: str | None, before: Reading | None, after: Reading) -> float | None:
    labels = () if stage is None else (stage,)
    total, count = after.value(f"{name}_sum", *labels), after.value(f"{name}_count", *labels)
    if before is not None:
        total -= before.value(f"{name}_sum", *labels)
        count -= before.value(f"{name}_count", *labels)
    return total / count if count > 0 else None
