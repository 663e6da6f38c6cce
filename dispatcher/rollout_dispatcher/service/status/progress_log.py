"""Says in the log how the run gets on: one line now and then, none while nothing changes."""

import logging
from dataclasses import dataclass
from typing import Self

from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.parts import Statistics
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.status.health import Health

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a line tells the progress from. excess: the sum of that of all planned steps."""

    at: float
    accepted: int
    committed: int
    steps: int
    planned: int
    excess: float

    @classmethod
    def of(cls, now: float, at: Statistics, metrics: Metrics) -> Self:
        return cls(
            now, at.accepted, at.samples_committed, at.steps_committed,
            metrics.planned_steps, metrics.planned_excess,
        )  # fmt: skip


class ProgressLog:
    """Looks at one run, as often as it is asked to. interval: seconds between lines; None: none."""

    def __init__(
        self, core: Dispatch, metrics: Metrics, health: Health, interval: float | None, now: float
    ) -> None:
        self._core, self._metrics, self._health = core, metrics, health
        self._interval = interval
        self._due = now + (interval or 0.0)
        at = core.statistics()
        self._before, self._shown = _Mark.of(now, at, metrics), _state(at)

    def check(self, now: float) -> None:
        """Speak if it is due, and there is anything new."""
        if self._interval is None or now < self._due:
            return
        self._due = now + self._interval
        at = self._core.statistics()
        mark, state = _Mark.of(now, at, self._metrics), _state(at)
        if state != self._shown:
            log.info("%s", self._line(at, mark))
        self._before, self._shown = mark, state

    def _line(self, at: Statistics, mark: _Mark) -> str:
        before = self._before
        seconds = max(mark.at - before.at, 1e-9)
        came = (mark.accepted - before.accepted) / seconds
        went = (mark.committed - before.committed) / seconds
        planned = mark.planned - before.planned
        excess = f"{100 * (mark.excess - before.excess) / planned:.2g} %" if planned else "none"
        window = self._core.config.trigger.window
        return (
            f"{at.steps_committed} steps ({mark.steps - before.steps:+d}), samples/s: {came:.3g} "
            f"accepted, {went:.3g} trained on; {at.ready_units} ready of a window of {window}, "
            f"planned excess {excess}, DP ranks {at.ranks_connected} of {at.dp_size}, producers "
            f"{at.producers_connected}; the next step waits for: {self._health.explain()}"
        )


def _state(at: Statistics) -> tuple[object, ...]:
    """What has to change for a line to be worth writing."""
    return (
        at.steps_committed, at.open_steps, at.accepted, at.buffered, at.pushes_held,
        at.ranks_connected, at.producers_connected, at.run_state,
    )  # fmt: skip
