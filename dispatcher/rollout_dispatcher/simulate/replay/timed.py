"""Timed arrivals: samples come when the trace says, and a trainer takes the time that steps need.

A discrete-event run: the next thing to happen is the end of the step in training, an arrival, or
a deadline of the core (`max_wait`). The trainer prefetches one step, so the next one is planned
when it begins one. Planning and delivery take no time here; what they really take is milliseconds.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.sample import Sample
from rollout_dispatcher.simulate.epochs import Epochs, doomed
from rollout_dispatcher.simulate.replay.steady import longest_kept
from rollout_dispatcher.simulate.replay.trainer import Trainer, seconds_per_cost
from rollout_dispatcher.simulate.replay.virtual import Setting, VirtualDispatch, VirtualStep
from rollout_dispatcher.simulate.trace import Trace

#: A timer never rings early; at its exact time rounding could leave it due for ever.
_TIMER_LATENESS = 1e-6


@dataclass(frozen=True, slots=True)
class Clockwork:
    """How long things took, in seconds.

    elapsed: from the beginning of the first step to the end of the last. of_data, of_stragglers:
    rank time spent waiting for samples and for other ranks, mean over ranks. waits: of each
    dispatched sample, from its arrival in the trace to the plan that took it.
    finished: the end of the last step, from the first arrival.
    """

    elapsed: float
    of_data: float
    of_stragglers: float
    finished: float
    waits: list[float]


def check_arrivals(trace: Trace) -> None:
    """Refuse a trace that does not say when samples arrive, or says that all do at once."""
    unknown = np.flatnonzero(np.isnan(trace.arrival))
    if len(unknown):
        raise ConfigError(
            f"--arrivals trace: row {trace.row[unknown[0]]} of {trace.name} has no arrival_s, so "
            "there is nothing to replay; use --arrivals steady"
        )
    if np.ptp(trace.arrival) <= 0:
        raise ConfigError(
            f"--arrivals trace: all samples of {trace.name} arrive at once; use --arrivals steady"
        )


class _Producers:
    """Push what has arrived, one by one, and wait while a push is held.

    Only members of a group that the buffer has begun pass by: room is reserved for them.
    """

    def __init__(self, virtual: VirtualDispatch, setting: Setting, trace: Trace) -> None:
        self._virtual = virtual
        self._source: Iterator[tuple[float, Sample]] = Epochs(
            trace, 0, whole_groups=setting.core.groups_matter
        ).once_in_order_of_arrival()
        self._start = float(trace.arrival.min())
        gone = doomed(
            trace,
            longest_kept(setting.plan),
            whole_groups=setting.core.groups_matter,
            micro_batch=setting.core.limits.micro_batch,
        )
        self._doomed = frozenset(f"0-{row}" for row in trace.row[gone])
        self._next = next(self._source, None)
        self._ended = False
        self._waiting: deque[Sample] = deque()
        self.arrived_at: dict[str, float] = {}

    @property
    def due(self) -> float:
        """When the next sample arrives."""
        return math.inf if self._next is None else self._next[0] - self._start

    def proceed(self, now: float) -> None:
        """Push everything that has arrived by now, as far as there is room."""
        self._catch_up()
        while self._next is not None and self.due <= now:
            sample = self._next[1]
            self.arrived_at[sample.sample_id] = self.due
            self._arrive(sample)
            self._next = next(self._source, None)
        if self._next is None and not self._blocked and not self._ended:
            self._ended = True
            self._virtual.end_stream()

    def _arrive(self, sample: Sample) -> None:
        if sample.sample_id in self._doomed:
            self._virtual.drop((sample,), str(DropReason.OVERSIZE))
        elif not self._blocked or self._virtual.core.is_expected(sample):
            self._virtual.push((sample,), may_hold=True)
        else:
            self._waiting.append(sample)

    def _catch_up(self) -> None:
        """Push what waits while there is room, and behind it the members of begun groups."""
        is_expected = self._virtual.core.is_expected
        progress = True
        while progress:
            progress = False
            while self._waiting and not self._virtual.holds_a_push:
                self._virtual.push((self._waiting.popleft(),), may_hold=True)
                progress = True
            for sample in [sample for sample in self._waiting if is_expected(sample)]:
                self._waiting.remove(sample)
                self._virtual.push((sample,), may_hold=True)
                progress = True

    @property
    def _blocked(self) -> bool:
        return bool(self._waiting) or self._virtual.holds_a_push


def run_timed(
    setting: Setting,
    trace: Trace,
    load: float,
    steps: int | None,
    on_step: Callable[[VirtualStep], None],
) -> Clockwork:
    """Run through the trace once, or until `steps` steps are trained."""
    waits: list[float] = []

    def planned(step: VirtualStep) -> None:
        trainer.expect(step)
        if steps is not None and step.number >= steps:
            return  # prefetched beyond the last that counts
        for at in step.plan.chosen.tolist():
            sample_id = step.entries[at].sample.sample_id
            waits.append(step.at - producers.arrived_at[sample_id])
        on_step(step)

    virtual = VirtualDispatch(setting, planned)
    trainer = Trainer(virtual, seconds_per_cost(trace, setting, load))
    producers = _Producers(virtual, setting, trace)
    virtual.join()
    virtual.demand(-1, hungry=True)
    while not virtual.core.drained and (steps is None or trainer.trained < steps):
        deadline = virtual.core.next_deadline()
        tick = math.inf if deadline is None else deadline + _TIMER_LATENESS
        then = max(virtual.now, min(trainer.ends, producers.due, tick))
        assert math.isfinite(then), "samples are left and nothing is going to happen"
        virtual.now = then
        if tick <= then:
            virtual.tick()
        producers.proceed(then)
        trainer.proceed(then)
    return Clockwork(
        trainer.elapsed, trainer.of_data, trainer.of_stragglers, trainer.finished, waits
    )
