"""What readings of one process add up to: rates of late, and how steps went over time.

Counters begin anew with a process, so history does too. Bounded: readings of the last half minute,
two in which ranks had told of a further step, and as many points as the widest terminal shows.
"""

from collections import deque
from dataclasses import dataclass, field

from rollout_dispatcher.cli.top.reading import STAGES, Reading

#: Rates are taken over so many seconds: long enough to be calm, short enough to follow.
RATE_SECONDS = 30.0
_MAX_READINGS = 300
_MAX_POINTS = 512
#: Grows when every rank has told what a step took.
_TOLD = "rank_compute_seconds_total"
#: More of its time than that no rank has computed, whenever looks fall between its steps.
_TOO_MUCH = 1.5


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
    """readings: of late, of one process. points: imbalance by stage, one for each new step.

    told: the process's first reading, and those of late in which ranks had told what further steps
    took; at least the last two, as a step may take longer than rates do.
    """

    readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=_MAX_READINGS))
    told: deque[Reading] = field(default_factory=lambda: deque(maxlen=_MAX_READINGS))
    points: dict[str, deque[float]] = field(
        default_factory=lambda: {stage: deque(maxlen=_MAX_POINTS) for stage in STAGES}
    )
    _began: Reading | None = None

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
            self.told.clear()
            for points in self.points.values():
                points.clear()
        if not self.readings:
            self._began = reading
        for stage in STAGES:
            before = self.readings[-1] if self.readings else None
            value = _mean("step_imbalance_ratio", stage, before, reading)
            if value is not None:
                self.points[stage].append(value)
        self.readings.append(reading)
        if not self.told or reading.metrics[_TOLD] != self.told[-1].metrics[_TOLD]:
            self.told.append(reading)
        for kept in (self.readings, self.told):
            while len(kept) > 2 and kept[1].at <= reading.at - RATE_SECONDS:
                kept.popleft()

    def rate(self, name: str) -> float | None:
        """A count of /statusz a second; None while there is one reading."""
        if self.seconds <= 0:
            return None
        gained = self.last.status[name] - self.readings[0].status[name]
        return float(gained) / self.seconds

    def shares(self, name: str) -> dict[int, float]:
        """Seconds a second, by DP rank, of a counter of seconds."""
        return _shares(name, self.readings[0], self.last, self.seconds)

    def shares_of_steps(self, name: str) -> dict[int, float]:
        """The same of one that grows when a step is told: over the time of the last steps.

        Once nothing was told for longer than that took, up to now. Nothing, where the only step
        that was told had begun long before the first look.
        """
        first, last, now = self.told[0], self.told[-1], self.last
        if len(self.told) > 2 and first is self._began:
            first = self.told[1]
        seconds = last.at - first.at
        computed = _shares(_TOLD, first, last, seconds)
        if first is self._began and max(computed.values(), default=0.0) > _TOO_MUCH:
            return {}
        if now.at - last.at > seconds > 0:
            seconds = now.at - first.at
        found = _shares(name, first, last, seconds)
        return {at: min(1.0, share) for at, share in found.items()}

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


def _shares(name: str, first: Reading, last: Reading, seconds: float) -> dict[int, float]:
    """Of a counter of seconds, by DP rank. One that was not there before says nothing yet: what it
    counts may be of an earlier time, as of a rank that comes back where their number changes.
    """
    if seconds <= 0:
        return {}
    before = first.by_rank(name)
    return {
        at: max(0.0, value - before.get(at, 0.0)) / seconds
        for at, value in last.by_rank(name).items()
        if at in before or not before
    }


def _mean(name: str, stage: str | None, before: Reading | None, after: Reading) -> float | None:
    labels = () if stage is None else (stage,)
    total, count = after.value(f"{name}_sum", *labels), after.value(f"{name}_count", *labels)
    if before is not None:
        total -= before.value(f"{name}_sum", *labels)
        count -= before.value(f"{name}_count", *labels)
    return total / count if count > 0 else None
