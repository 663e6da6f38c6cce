"""The core that `serve` runs, its planner called on the spot, under a clock that is told.

All DP ranks finish a step at the same moment, as an optimizer step ends in a collective, so they
ask for the next one together: one rank in the core speaks for all of them. (With one for
each the plans are the same, and time goes into 500 equal messages a step.)

Invariant: every sample is announced once, in the first step planned after it (with its group)
entered the window, and every step is announced once, in order.

Steady arrivals: the window is full whenever a step is planned, as with generous producers. Each
turn the ranks commit the step before, the window is refilled to `floor(W * B)` samples, then the
ranks ask for the next step. The clock counts turns.

Timed arrivals: samples come when the trace says, and a trainer takes the time that steps need. The
next thing to happen is the end of the step in training, an arrival, or a deadline of the core. The
trainer prefetches one step, so the next one is planned when it begins one. Planning and delivery
take no time here; what they really take is milliseconds.
"""

import math
import time
from collections import Counter, deque
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
from rollout_dispatcher.simulate.trace import Epochs, Trace, Unit, doomed
from rollout_planner.planner import plan
from rollout_planner.types import BoolArray, IntArray, Oversize, Plan, PlanConfig, Strategy

#: Who pushes every sample.
PRODUCER = "trace"
#: Nobody waits out bounds on skips that are larger than this.
MOST_WARM_UP_STEPS = 200
#: A timer never rings early; at its exact time rounding could leave it due for ever.
_TIMER_LATENESS = 1e-6
#: Into so many pushes the arrivals of one step are brought together: the core takes as long for a
#: push of one sample as for one of a hundred.
PUSHES_A_STEP = 32


@dataclass(frozen=True, slots=True)
class Setting:
    """What one row of the table is run with.

    cost_errors: factors by which the part of the cost that is proportional to tokens may be off.
    """

    strategy: Strategy
    window: float
    plan: PlanConfig
    core: DispatchConfig
    cost_errors: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """As its row is called: by the strategy, or that long samples are split."""
        return f"split {most}" if (most := self.plan.max_split) > 1 else str(self.strategy)


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """One planned step.

    samples: in delivery order. arrived: what entered the window since the step before. skips: of
    each of `samples`. seconds: spent in the planner. dropped: reason by sample id, since the step
    before.
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
        self.core = DispatcherCore(replace(setting.core, dp_size=core_ranks))
        self.now = 0.0
        #: Steps that the ranks hold and may train, in order.
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
        """Push samples together; whether they were taken (else they are held, or none was)."""
        first = self._next_seq
        self._next_seq += len(samples)
        self._unanswered[first] = samples
        push = Push(PRODUCER, first, tuple(samples), min(self._unanswered))
        before = self._num_accepted
        self._perform(self.core.push(push, self.now, may_wait=may_hold))
        return self._num_accepted > before

    def drop(self, samples: Sequence[Sample], reason: str) -> None:
        """Samples that never enter the window; the next step's line names them."""
        self._dropped.update(dict.fromkeys((sample.sample_id for sample in samples), reason))

    @property
    def holds_a_push(self) -> bool:
        """Whether a push waits for room in the buffer."""
        return bool(self._unanswered)

    def end_stream(self) -> None:
        """Nothing more will be pushed."""
        self._perform(self.core.end_stream(self.now, PRODUCER))

    # -- ranks ------------------------------------------------------------------------------

    def join(self) -> None:
        """The ranks connect, and have room for a step."""
        for rank in range(self.core.config.dp_size):
            generation = self.core.generation if rank else None
            hello = RankHello(f"rank{rank}", rank, self.core.config.dp_size, generation)
            self._perform(self.core.join(hello, self.now))
        self.demand(-1, hungry=False)  # they begin where the run stands

    def demand(self, taken: int, *, hungry: bool) -> None:
        """The ranks have begun step `taken`, and wait for the next or not."""
        for rank in range(self.core.config.dp_size):
            self._perform(self.core.demand(rank, taken, self.now, hungry=hungry))

    def commit(self, step: int) -> None:
        """The ranks have applied a step."""
        for rank in range(self.core.config.dp_size):
            self._perform(self.core.commit(rank, step, self.now))

    def tick(self) -> None:
        """Do what has become due."""
        self._perform(self.core.tick(self.now))

    # -- the shell's part -------------------------------------------------------------------

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
    """Steps until the window has aged as far as it will.

    A sample stays for at most `max_skips + 1` steps, so after that many nothing is left that the
    empty start has shaped, and after as many again neither is what was chosen beside it. Without
    a choice every step is like the first.
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
    """Plan the warm-up and `steps` steps more; `on_step` is told of every one, from 0 on."""
    virtual = VirtualDispatch(setting, on_step, core_ranks)
    units, window = _not_dropped(virtual, setting, epochs), setting.core.trigger.window
    waiting: Unit = ()

    def refill() -> None:
        nonlocal waiting
        room = window - virtual.core.statistics().buffered
        if not setting.core.groups_matter:
            virtual.push([next(units)[0] for _ in range(room)], may_hold=False)
            return
        # The group that does not fit is pushed too: so the core learns that the window is full.
        while room > 0:
            waiting = waiting or next(units)
            if not virtual.push(waiting, may_hold=False):
                break
            room -= len(waiting)
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
    """Samples that are dropped as longer than a micro-batch; where groups matter with theirs."""
    config = setting.plan
    return doomed(
        trace,
        config.longest_in_budget if config.oversize is Oversize.DROP else None,
        whole_groups=setting.core.groups_matter,
        micro_batch=setting.core.limits.micro_batch,
    )


# -- timed arrivals ---------------------------------------------------------------------------


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
    """Push what has arrived, and wait while a push is held.

    Samples that arrive close together, beside how long a step lasts, come in one push, at the time
    of the last. Only members of a group that the buffer has begun pass by: room is reserved for
    them.
    """

    def __init__(self, virtual: VirtualDispatch, setting: Setting, trace: Trace) -> None:
        self._virtual = virtual
        self._groups_matter = setting.core.groups_matter
        epochs = Epochs(trace, 0, whole_groups=self._groups_matter)
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
        self._waiting: deque[Sample] = deque()
        #: How many of those are of each group.
        self._members: Counter[str | None] = Counter()

    @property
    def due(self) -> float:
        """When the next samples arrive."""
        return self._pushes[0][-1][0] if self._pushes else math.inf

    def proceed(self, now: float) -> None:
        """Push everything that has arrived by now, as far as there is room."""
        self._catch_up()
        while self.due <= now:
            self._arrive([sample for _, sample in self._pushes.popleft()])
        if not (self._pushes or self._blocked or self._ended):
            self._ended = True
            self._virtual.end_stream()

    def _arrive(self, samples: list[Sample]) -> None:
        kept = [sample for sample in samples if sample.sample_id not in self._doomed]
        if len(kept) < len(samples):
            lost = [sample for sample in samples if sample.sample_id in self._doomed]
            self._virtual.drop(lost, str(DropReason.OVERSIZE))
        if not self._blocked:
            self._push(kept)
        else:
            self._waiting += kept
            self._members.update(sample.group_id for sample in kept)
            self._push_expected()

    def _catch_up(self) -> None:
        """Push what waits while there is room, and behind it the members of begun groups."""
        while self._waiting and not self._virtual.holds_a_push:
            count = min(len(self._waiting), PUSHES_A_STEP)
            self._push_waiting([self._waiting.popleft() for _ in range(count)])
        self._push_expected()

    def _push_expected(self) -> None:
        """What waits, and belongs to groups that the buffer has begun."""
        if not self._groups_matter:
            return
        is_open = self._virtual.core.is_open
        begun = {group for group in self._members if group is not None and is_open(group)}
        if begun:
            found = [sample for sample in self._waiting if sample.group_id in begun]
            self._waiting = deque(each for each in self._waiting if each.group_id not in begun)
            self._push_waiting(found)

    def _push_waiting(self, samples: list[Sample]) -> None:
        """Push what has waited."""
        self._members -= Counter(sample.group_id for sample in samples)  # zeros go
        self._push(samples)

    def _push(self, samples: list[Sample]) -> None:
        if samples:
            self._virtual.push(samples, may_hold=True)

    @property
    def _blocked(self) -> bool:
        return bool(self._waiting) or self._virtual.holds_a_push


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
        assert math.isfinite(then), "samples are left and nothing is going to happen"
        virtual.now = then
        if tick <= then:
            virtual.tick()
        producers.proceed(then)
        trainer.proceed(then)
    return Clockwork(
        trainer.elapsed, trainer.of_data, trainer.of_stragglers, trainer.finished, waits
    )
