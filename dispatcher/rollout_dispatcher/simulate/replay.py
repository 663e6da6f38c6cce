"""Runs the core and planner of `serve` in virtual time, over a trace.

All DP ranks finish a step at the same moment, as an optimizer step ends in a collective. So one
rank in the core stands for all of them: the plans are the same, with 1/R of the messages.

Invariant: every step is reported once, in order, and every sample once as arrived, in the first
step planned after it (with its group) entered the window.

Steady arrivals: the window is full whenever a step is planned. In each turn the ranks commit the
last step, the window is refilled to `floor(W * B)` samples, then the ranks request the next step.
The clock counts turns.

Timed arrivals: samples arrive at the times of the trace, and a trainer takes as long as the steps
cost. The next event is the end of the step in training, an arrival, or a deadline of the core. The
trainer prefetches one step. Planning and delivery take no time (milliseconds in reality).
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import (
    Decision,
    Deliver,
    PlanRequested,
    PushAnswered,
    Release,
    StepPlanned,
)
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.sample import Outcome, Sample
from rollout_dispatcher.simulate.result import RankTime
from rollout_dispatcher.simulate.trace import Epochs, Trace, Unit, doomed
from rollout_planner.planner import plan
from rollout_planner.types import BoolArray, IntArray, Oversize, Plan, PlanConfig, Strategy

#: The producer of every sample.
PRODUCER = "trace"
#: Larger bounds on skips are not warmed up for.
MOST_WARM_UP_STEPS = 200
#: At the exact time of a deadline, rounding could leave it due for ever.
_TIMER_LATENESS = 1e-6
#: Pushes that the arrivals of one step are joined to: the core takes as long for a push of one
#: sample as for one of a hundred.
PUSHES_A_STEP = 32


@dataclass(frozen=True, slots=True)
class Setting:
    """The configuration of one row of the table.

    cost_errors: factors by which the part of the cost that is proportional to tokens may be wrong.
    """

    strategy: Strategy
    window: float
    plan: PlanConfig
    core: DispatchConfig
    cost_errors: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The name of the row: the strategy, or `split N`."""
        return f"split {most}" if (most := self.plan.max_split) > 1 else str(self.strategy)


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """One planned step.

    samples: in delivery order. arrived: samples that entered the window since the last step. skips:
    of each of `samples`. seconds: spent in the planner. dropped: reason by sample id, since the
    last step.
    """

    number: int
    at: float
    plan: Plan
    samples: tuple[Sample, ...]
    arrived: tuple[Sample, ...]
    skips: IntArray
    trigger: Trigger
    seconds: float
    dropped: dict[str, str]


class VirtualDispatch:
    """A core, a planner and a clock; hands every step to `on_step`."""

    def __init__(
        self, setting: Setting, on_step: Callable[[VirtualStep], None], core_ranks: int = 1
    ) -> None:
        # One producer stands for all of them, whose credits bound nothing together.
        config = replace(setting.core, dp_size=core_ranks, producer_credits=sys.maxsize)
        self.core = DispatcherCore(config)
        self.now = 0.0
        #: Steps that the ranks may train, in order.
        self.released: deque[int] = deque()
        self.num_planned = 0
        self._setting = setting
        self._on_step = on_step
        self._unanswered: dict[int, Sequence[Sample]] = {}
        self._next_seq = self._num_accepted = 0
        self._dropped: dict[str, str] = {}
        self._in_window: set[Entry] = set()
        self._planning: tuple[PlanRequested, float] | None = None

    # -- producers --------------------------------------------------------------------------

    def push(self, samples: Sequence[Sample], *, may_hold: bool) -> bool:
        """Push samples together, which may block if `may_hold`; returns whether any is accepted."""
        first = self._next_seq
        self._next_seq += len(samples)
        self._unanswered[first] = samples
        push = Push(PRODUCER, first, tuple(samples), min(self._unanswered))
        before = self._num_accepted
        self._perform(self.core.push(push, self.now, may_wait=may_hold))
        return self._num_accepted > before

    def drop(self, samples: Sequence[Sample], reason: str) -> None:
        """Count samples that never enter the window as dropped; the next step reports them."""
        self._dropped.update(dict.fromkeys((sample.sample_id for sample in samples), reason))

    @property
    def holds_a_push(self) -> bool:
        """Whether a push is blocked."""
        return bool(self._unanswered)

    def end_stream(self) -> None:
        """End the producer's stream."""
        self._perform(self.core.end_stream(self.now, PRODUCER))

    # -- ranks ------------------------------------------------------------------------------

    def join(self) -> None:
        """Connect the ranks; they have credit for a step."""
        for rank in range(self.core.config.dp_size):
            generation = self.core.generation if rank else None
            hello = RankHello(f"rank{rank}", rank, self.core.config.dp_size, generation)
            self._perform(self.core.join(hello, self.now))
        self.demand(-1, hungry=False)

    def demand(self, taken: int, *, hungry: bool) -> None:
        """The ranks have begun step `taken`; hungry: they wait for the next."""
        for rank in range(self.core.config.dp_size):
            self._perform(self.core.demand(rank, taken, self.now, hungry=hungry))

    def commit(self, step: int) -> None:
        """Commit a step on all ranks."""
        for rank in range(self.core.config.dp_size):
            self._perform(self.core.commit(rank, step, self.now))

    def tick(self) -> None:
        """Let the core's deadlines pass."""
        self._perform(self.core.tick(self.now))

    # -- effects ----------------------------------------------------------------------------

    def _perform(self, decision: Decision) -> None:
        queue = deque(decision.effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, PlanRequested):
                began = time.perf_counter()
                found = plan(effect.window, self._setting.plan, effect.take)
                self._planning = effect, time.perf_counter() - began
                queue.extend(self.core.planned(effect, found, self.now).effects)
            elif isinstance(effect, StepPlanned):
                self._announce(effect)
            elif isinstance(effect, PushAnswered):
                self._answered(effect)
            elif isinstance(effect, Deliver):
                step = self.core.step(effect.step)
                assert step is not None
                reply = self.core.prepared(effect.dp_rank, step.number, step.digest, self.now)
                queue.extend(reply.effects)
            elif isinstance(effect, Release):
                self.released.append(effect.step)

    def _answered(self, answer: PushAnswered) -> None:
        del self._unanswered[answer.first_seq]
        if answer.errors:
            raise ConfigError(next(iter(answer.errors.values())))
        self._num_accepted += answer.outcomes.count(Outcome.ACCEPTED)

    def _announce(self, report: StepPlanned) -> None:
        assert self._planning is not None
        wanted, seconds = self._planning
        arrived = [entry for entry in wanted.entries if entry not in self._in_window]
        self._in_window.update(arrived)
        chosen = [wanted.entries[at] for at in report.plan.chosen.tolist()]
        self._in_window.difference_update(chosen)
        step = VirtualStep(
            number=report.step,
            at=self.now,
            plan=report.plan,
            samples=tuple(entry.sample for entry in chosen),
            arrived=tuple(entry.sample for entry in arrived),
            skips=report.skips,
            trigger=report.trigger,
            seconds=seconds,
            dropped=self._dropped,
        )
        self._dropped = {}
        self.num_planned += 1
        self._on_step(step)


# -- steady arrivals --------------------------------------------------------------------------


def warm_up_steps(setting: Setting) -> int:
    """Steps until the window is in a steady state.

    A sample stays for at most `max_skips + 1` steps. After that many no sample of the initial fill
    is left; after as many again, none that was passed over for these. A window of one batch needs
    no warm-up.
    """
    config = setting.plan
    if setting.core.trigger.window <= setting.core.trigger.batch:
        return 0
    bound = max(config.max_skips, config.outlier_max_skips or 0)
    return min(2 * (bound + 1), MOST_WARM_UP_STEPS)


def run_steady(
    setting: Setting,
    epochs: Epochs,
    steps: int,
    on_step: Callable[[VirtualStep], None],
    core_ranks: int = 1,
) -> None:
    """Plan the warm-up and then `steps` steps; `on_step` is called with each, from number 0."""
    virtual = VirtualDispatch(setting, on_step, core_ranks)
    units, window = _not_dropped(virtual, setting, epochs), setting.core.trigger.window
    waiting: Unit = ()

    def refill() -> None:
        nonlocal waiting
        room = window - virtual.core.statistics().ready_units
        if not setting.core.groups_matter:
            virtual.push([next(units)[0] for _ in range(room)], may_hold=False)
            return
        # Push the group that does not fit, too: the core takes the window as full then.
        while room > 0:
            waiting = waiting or next(units)
            if not virtual.push(waiting, may_hold=False):
                break
            room -= 1 if virtual.core.config.by_groups else len(waiting)
            waiting = ()

    refill()
    virtual.join()
    for turn in range(1, warm_up_steps(setting) + steps):
        step = virtual.released.popleft()
        virtual.commit(step)
        virtual.now = float(turn)
        refill()
        virtual.demand(step, hungry=True)


def _not_dropped(virtual: VirtualDispatch, setting: Setting, epochs: Epochs) -> Iterator[Unit]:
    trace = epochs.trace
    rows = frozenset(trace.row[dropped_samples(trace, setting)].tolist())
    for unit in epochs:
        if rows and int(unit[0].sample_id.partition("-")[2]) in rows:
            virtual.drop(unit, str(DropReason.OVERSIZE))
        else:
            yield unit


def dropped_samples(trace: Trace, setting: Setting) -> BoolArray:
    """Samples dropped as longer than a micro-batch; their groups too, where these matter."""
    config = setting.plan
    return doomed(
        trace,
        config.longest_in_budget if config.oversize is Oversize.DROP else None,
        whole_groups=setting.core.groups_matter,
        micro_batch=setting.core.limits.micro_batch,
    )


# -- timed arrivals ---------------------------------------------------------------------------


def check_arrivals(trace: Trace) -> None:
    """Raise ConfigError for a trace without times of arrival, or with one time only."""
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
    """Pushes samples as they arrive; the core blocks a push for which it has no room.

    Samples that arrive within a small part of a step are one push, at the time of the last.
    """

    def __init__(self, virtual: VirtualDispatch, setting: Setting, trace: Trace) -> None:
        self._virtual = virtual
        epochs = Epochs(trace, 0, whole_groups=setting.core.groups_matter)
        arrivals = list(epochs.once_in_order_of_arrival())
        start = arrivals[0][0]
        self.arrived_at = {sample.sample_id: at - start for at, sample in arrivals}
        slices = PUSHES_A_STEP * len(trace) / setting.plan.dispatch_batch_size
        width = float(np.ptp(trace.arrival)) / slices
        self._pushes = deque(
            [(at - start, sample) for at, sample in push]
            for _, push in groupby(arrivals, key=lambda each: (each[0] - start) // width)
        )
        self._doomed = frozenset(f"0-{row}" for row in trace.row[dropped_samples(trace, setting)])
        self._ended = False

    @property
    def due(self) -> float:
        """The next time of arrival; infinity if there is none."""
        return self._pushes[0][-1][0] if self._pushes else math.inf

    def proceed(self, now: float) -> None:
        """Push everything that has arrived by now."""
        while self.due <= now:
            samples = [sample for _, sample in self._pushes.popleft()]
            lost = [sample for sample in samples if sample.sample_id in self._doomed]
            self._virtual.drop(lost, str(DropReason.OVERSIZE))
            if len(lost) < len(samples):
                kept = [sample for sample in samples if sample.sample_id not in self._doomed]
                self._virtual.push(kept, may_hold=True)
        if not (self._pushes or self._virtual.holds_a_push or self._ended):
            self._ended = True
            self._virtual.end_stream()


def seconds_per_cost(trace: Trace, setting: Setting, load: float) -> float:
    """The speed at which perfectly balanced ranks are busy for the share `load` of the trace."""
    total = float(setting.plan.cost(trace.tokens).sum())
    if total <= 0:
        raise ConfigError("--cost: the whole trace costs nothing, so training it takes no time")
    return load * float(np.ptp(trace.arrival)) * setting.plan.dp_size / total


class Trainer:
    """Trains the released steps one after the other; times in seconds.

    ends: the end of the step in training, infinity if there is none. of_data, of_stragglers: time
    spent waiting since the first step began. finished: the end of the last step. trained: steps.
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
        """Note how long a planned step will take, and how much of that is waiting."""
        took, even = step.plan.time, step.plan.even_time
        self._expected[step.number] = took * self._speed, (took - even) * self._speed

    def proceed(self, now: float) -> None:
        """End the step whose time has passed, and begin the next if it is released."""
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


def run_timed(
    setting: Setting,
    trace: Trace,
    load: float,
    steps: int | None,
    on_step: Callable[[VirtualStep], None],
) -> RankTime:
    """Replay the trace once, or until `steps` steps are trained."""
    waits: list[float] = []

    def planned(step: VirtualStep) -> None:
        trainer.expect(step)
        if steps is not None and step.number >= steps:
            return  # prefetched behind the last step that counts
        waits.extend(step.at - producers.arrived_at[each.sample_id] for each in step.samples)
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
        assert math.isfinite(then), "samples are left and no event will come"
        virtual.now = then
        if tick <= then:
            virtual.tick()
        producers.proceed(then)
        trainer.proceed(then)
    return RankTime.of(
        trainer.elapsed, trainer.finished, trainer.of_data, trainer.of_stragglers, waits
    )
