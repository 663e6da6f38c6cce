"""A core with its planner run inline, its ranks, and a clock that moves when told to."""

from dataclasses import replace

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import (
    Decision,
    Effect,
    PayloadsToJournal,
    PlanRequested,
    PushAnswered,
    ReplanRequested,
    StepPlanned,
)
from rollout_dispatcher.core.facts import DropReason, Fact
from rollout_dispatcher.core.planning.trigger import Trigger, TriggerConfig
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.sample import Outcome, Sample
from rollout_planner.cost import parse_cost
from rollout_planner.planner import plan
from rollout_planner.types import Grouping, PlanConfig, Strategy
from tests.support.core.memory import Memory
from tests.support.samples import make_sample

#: Where payloads of references are.
STORE = "files"


class Bench:
    """A core with its planner run inline, two ranks, and a clock that moves when told to."""

    stores = frozenset({STORE})

    def __init__(
        self,
        *,
        batch: int = 4,
        window: int = 6,
        capacity: int = 6,
        nbytes: int = 1 << 20,
        held_bytes: int = 1 << 20,
        max_wait: float = 2.0,
        dp_size: int = 2,
        **options: object,
    ) -> None:
        self.now = 100.0
        self.ranks = range(dp_size)
        self.planned: list[StepPlanned] = []
        self.log: list[Effect] = []
        #: What was to be made durable, and what it adds up to; nothing unless `durable`.
        self.facts: list[Fact] = []
        self.memory = Memory()
        self._next_seq = 0
        #: Whether the journal, if there is one, makes durable what it is given.
        self.syncs = True
        #: Whether the planner answers.
        self.plans = True
        config = DispatchConfig(
            dp_size=dp_size,
            limits=BufferLimits(
                capacity, batch, None, nbytes, 1000, held_bytes, stores=self.stores
            ),
            trigger=TriggerConfig(batch, window, max_wait),
            **options,  # type: ignore[arg-type]
        )
        self.core = DispatcherCore(config)
        self.plan_config = PlanConfig(
            dp_size=dp_size,
            dispatch_batch_size=batch,
            cost=parse_cost("tokens", lambda _: ""),
            micro_batch_tokens=1000,
            strategy=Strategy.WINDOW,
            grouping=Grouping.STEP if config.groups_matter else Grouping.IGNORE,
        )

    def perform(self, decision: Decision) -> None:
        self.facts += decision.facts
        self.memory.note(decision.facts, decision.totals)
        for effect in decision.effects:
            self.log.append(effect)
            if isinstance(effect, StepPlanned):
                self.planned.append(effect)
            if isinstance(effect, PayloadsToJournal) and self.syncs:
                self.perform(self.core.payloads_durable(effect.entries, self.now))
            if isinstance(effect, PlanRequested) and self.plans:
                answer = plan(effect.window, self._config(effect), effect.take)
                self.perform(self.core.planned(effect, answer, self.now))
            if isinstance(effect, ReplanRequested):
                answer = plan(effect.window, self._config(effect), effect.take, whole=True)
                self.perform(self.core.replanned(effect, answer, self.now))

    def _config(self, wanted: PlanRequested | ReplanRequested) -> PlanConfig:
        config = replace(self.plan_config, slowness=wanted.slowness)
        return config if wanted.cost is None else replace(config, cost=wanted.cost)

    def join(self) -> None:
        """All ranks of a new process group."""
        for rank in self.ranks:
            generation = self.core._ledger.generation.number if rank else None
            hello = RankHello(f"r{rank}", rank, len(self.ranks), generation)
            self.perform(self.core.join(hello, self.now))

    def push(self, *samples: Sample, by: str = "p") -> tuple[Outcome, ...] | None:
        """Outcomes, or None while the push is held."""
        first = self._next_seq
        self._next_seq += len(samples)
        start = len(self.log)
        refers = any(not sample.is_in_memory for sample in samples)
        self.perform(self.core.push(Push(by, first, samples, has_references=refers), self.now))
        answers = [
            effect.outcomes
            for effect in self.log[start:]
            if isinstance(effect, PushAnswered) and effect.first_seq == first
        ]
        return answers[0] if answers else None

    def errors(self) -> list[str]:
        """Why samples were refused so far."""
        answers = [effect for effect in self.log if isinstance(effect, PushAnswered)]
        return [text for answer in answers for text in answer.errors.values()]

    def trained(self, step: int) -> set[str]:
        """The samples of an open step."""
        return {sample.sample_id for sample in self.core._ledger.steps[step].samples()}

    def push_plain(self, count: int, tokens: int = 4) -> None:
        names = range(self._next_seq, self._next_seq + count)
        self.push(*[make_sample(f"p/{name}", tokens) for name in names])

    def hungry(self) -> None:
        for rank in self.ranks:
            taken = self.core._ledger.ranks[rank].taken
            self.perform(self.core.demand(rank, taken, self.now, hungry=True))

    def train(self, step: int) -> None:
        """All ranks prepare, take and commit a step."""
        self.hold(step)
        for rank in self.ranks:
            self.perform(self.core.demand(rank, step, self.now, hungry=False))
        for rank in self.ranks:
            self.perform(self.core.commit(rank, step, self.now))

    def hold(self, step: int, *ranks: int) -> None:
        """These ranks, or all, prepare a step."""
        for rank in ranks or self.ranks:
            held = self.core._ledger.steps[step]
            self.perform(
                self.core.prepared(rank, step, held.digest, self.now, attempt=held.attempt)
            )

    def restart(self) -> None:
        """The process dies, and another goes on from what was noted; ranks are still to come."""
        self.core = DispatcherCore(self.core.config)
        self.perform(self.core.restore(self.memory.remembered(), self.now))

    def pass_time(self, seconds: float) -> None:
        """Let the clock run, with the ticks that the core asks for on the way."""
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.perform(self.core.tick(self.now))
        self.now = end

    @property
    def triggers(self) -> list[Trigger]:
        return [step.trigger for step in self.planned]

    def dropped(self, reason: DropReason) -> int:
        return self.core.statistics().dropped[reason]
