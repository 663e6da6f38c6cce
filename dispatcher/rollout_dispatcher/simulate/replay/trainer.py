"""The virtual trainer: takes steps as they are released, each for the time that its plan needs.

DP ranks meet at the end of every step, so they are simulated as one; the time in which ranks wait
for each other inside a step is told apart by `of_stragglers`.
"""

import math

import numpy as np

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.simulate.replay.virtual import Setting, VirtualDispatch, VirtualStep
from rollout_dispatcher.simulate.trace import Trace


def seconds_per_cost(trace: Trace, setting: Setting, load: float) -> float:
    """The speed at which perfectly balanced ranks are busy for `load` of the trace's duration."""
    total = float(setting.plan.cost(trace.tokens).sum())
    if total <= 0:
        raise ConfigError("--cost: the whole trace costs nothing, so training it takes no time")
    return load * float(np.ptp(trace.arrival)) * setting.plan.dp_size / total


class Trainer:
    """Trains one step after the other as they are released; times in seconds.

    ends: when the step in training does, infinity if there is none. of_data: waited for samples
    since the first step began. finished: the end of the last step. trained: steps so far.
    """

    def __init__(self, virtual: VirtualDispatch, seconds_per_cost: float) -> None:
        self._virtual = virtual
        self._speed = seconds_per_cost
        self._expected: dict[int, tuple[float, float]] = {}
        self._training: int | None = None
        self._taken = -1
        self._idle_since = math.nan
        self._began: float | None = None
        self.ends = math.inf
        self.of_data = self.of_stragglers = self.finished = 0.0
        self.trained = 0

    def expect(self, step: VirtualStep) -> None:
        """A step was planned: know how long it will take, and how much of that is waiting."""
        took, even = step.plan.time, step.plan.even_time
        self._expected[step.number] = took * self._speed, (took - even) * self._speed

    def proceed(self, now: float) -> None:
        """End the step whose time has come, and begin the next if it is there."""
        if self._training is not None and now >= self.ends:
            self._virtual.commit(self._training)
            self._taken, self._training = self._training, None
            self.trained += 1
            self._idle_since = self.finished = now
            self.ends = math.inf
        if self._training is None and self._virtual.released:
            self._begin(self._virtual.released.popleft(), now)
        elif self._training is None and self._idle_since == now:
            self._virtual.demand(self._taken, hungry=True)

    def _begin(self, step: int, now: float) -> None:
        if self._began is None:
            self._began = now
        else:
            self.of_data += now - self._idle_since
        self._training = step
        took, waiting = self._expected.pop(step)
        self.ends = now + took
        self.of_stragglers += waiting
        self._virtual.demand(step, hungry=False)

    @property
    def elapsed(self) -> float:
        """From the beginning of the first step to the end of the last."""
        return self.finished - (self._began or 0.0)
