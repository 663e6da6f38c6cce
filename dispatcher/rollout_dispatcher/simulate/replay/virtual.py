"""The core that `serve` runs, its planner called on the spot, under a clock that is told.

All DP ranks finish a step at the same moment, as an optimizer step ends in a collective, so they
ask for the next one together: one rank in the core speaks for all of them. (With one for
each the plans are the same, and time goes into 500 equal messages a step; a test compares.)

Invariant: every sample is announced once, in the first step planned after it (with its group)
entered the window, and every step is announced once, in order.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollout_dispatcher.core.admission.held_pushes import Push
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.effects import (
    Decision,
    Deliver,
    PlanWanted,
    PushAnswered,
    Release,
    StepPlanned,
)
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.sample import Outcome, Sample
from rollout_planner.planner import plan
from rollout_planner.types import IntArray, Plan, PlanConfig, Strategy

#: Who pushes every sample.
PRODUCER = "trace"


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


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """One planned step.

    entries: the window behind the plan's positions. arrived: what entered since the step before.
    skips: of each chosen sample, in the order of `plan.chosen`. seconds: spent in the planner.
    dropped: reason by sample id, since the step before.
    """

    number: int
    at: float
    plan: Plan
    entries: tuple[Entry, ...]
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
        self.core = Dispatch(replace(setting.core, dp_size=core_ranks))
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
        self._planning: tuple[PlanWanted, float] | None = None

    # -- producers --------------------------------------------------------------------------

    def push(self, samples: Sequence[Sample], *, may_hold: bool) -> bool:
        """Push samples together; whether they were taken (else they are held, or none was)."""
        first = self._next_seq
        self._next_seq += len(samples)
        self._unanswered[first] = samples
        push = Push(PRODUCER, first, tuple(samples), min(self._unanswered))
        before = self._num_accepted
        self._perform(self.core.push(push, self.now, may_hold=may_hold))
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
            if isinstance(effect, PlanWanted):
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
        self._in_window.difference_update(wanted.entries[at] for at in report.plan.chosen.tolist())
        step = VirtualStep(
            number=report.step,
            at=self.now,
            plan=report.plan,
            entries=wanted.entries,
            arrived=tuple(entry.sample for entry in arrived),
            skips=report.skips,
            trigger=report.trigger,
            seconds=seconds,
            dropped=self._dropped,
        )
        self._dropped = {}
        self.num_planned += 1
        self._on_step(step)
