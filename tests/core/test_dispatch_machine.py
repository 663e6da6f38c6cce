"""The core under any order of events: the books balance and nothing is trained on twice.

A state machine plays producers, ranks, planner and clock against one core, and keeps books of its
own: what was answered `accepted`, and what every committed step held.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dispatcher.balance.cost import parse_cost
from dispatcher.balance.planner import plan
from dispatcher.core.admission import Push
from dispatcher.core.buffer import BufferLimits
from dispatcher.core.config import DispatchConfig
from dispatcher.core.dispatch import Dispatch
from dispatcher.core.events import (
    Deliver,
    Effect,
    Outcome,
    PlanWanted,
    PushAnswered,
    Release,
    ReplanWanted,
)
from dispatcher.core.standing import RankHello
from dispatcher.core.step import OpenStep
from dispatcher.core.trigger import TriggerConfig
from dispatcher.errors import ConfigError, GenerationFenced, RankRefused
from dispatcher.plan import Grouping, PlanConfig
from dispatcher.sample import Sample
from tests.support.memory import Memory
from tests.support.samples import make_sample

DP_SIZE, BATCH, MAX_SKIPS = 2, 4, 3
MAX_DP_SIZE = 4


def check_size(dp_size: int) -> None:
    if dp_size > MAX_DP_SIZE:
        raise ConfigError("too many")


class DispatchMachine(RuleBasedStateMachine):
    """Producers `p` and `q`, one to four ranks, and whatever order hypothesis finds."""

    @initialize(window=st.sampled_from([4, 6, 8]), capacity=st.sampled_from([8, 12]))
    def start(self, window: int, capacity: int) -> None:
        self.now = 0.0
        self.core = Dispatch(
            DispatchConfig(
                dp_size=DP_SIZE,
                limits=BufferLimits(capacity, BATCH, None, 1 << 20, 64),
                trigger=TriggerConfig(BATCH, window, max_wait=1.0),
                group_timeout=20.0,
                producer_credits=2,
                max_staleness=4,
                durable=True,
                check_size=check_size,
            )
        )
        self.memory = Memory()
        self.plan_config = PlanConfig(
            dp_size=DP_SIZE,
            dispatch_batch_size=BATCH,
            cost=parse_cost("tokens", lambda _: ""),
            micro_batch_tokens=64,
            grouping=Grouping.STEP,
            max_skips=MAX_SKIPS,
        )
        self.next_seq = {"p": 0, "q": 0}
        self.pushes: dict[tuple[str, int], tuple[Sample, ...]] = {}
        self.accepted: set[str] = set()
        self.trained: Counter[str] = Counter()
        self.size = DP_SIZE
        self.wanted: PlanWanted | ReplanWanted | None = None
        self.digests: dict[int, str] = {}
        self.content: dict[int, list[str]] = {}
        self.holds: dict[int, set[int]] = {}
        self.released: dict[int, set[int]] = {}
        self.clients: dict[int, str] = {}
        self.births = 0

    # -- what the core asks for ---------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        self.memory.note(self.core.take_facts(), self.core.totals.as_json())
        for effect in effects:
            match effect:
                case PushAnswered():
                    samples = self.pushes[effect.producer, effect.first_seq]
                    for sample, outcome in zip(samples, effect.outcomes, strict=True):
                        if outcome is Outcome.ACCEPTED:
                            assert sample.sample_id not in self.accepted, "accepted twice"
                            self.accepted.add(sample.sample_id)
                case PlanWanted() | ReplanWanted():
                    assert self.wanted is None, "two plans at a time"
                    self.wanted = effect
                case Deliver():
                    step = self.core.ledger.steps[effect.step]
                    known = self.digests.setdefault(step.number, step.digest)
                    assert known == step.digest, "a redelivered step is not the same"
                    names = sorted(sample.sample_id for sample in step.samples())
                    same = self.content.setdefault(step.number, names) == names
                    assert same, "a step that is planned again has other samples"
                    assert step.dp_size == self.size, "a step for other ranks is delivered"
                    self.holds.setdefault(effect.dp_rank, set()).add(effect.step)
                case Release():
                    assert all(
                        effect.step in self.holds.get(rank, set())
                        or self.core.ledger.ranks[rank].committed >= effect.step
                        for rank in range(self.size)
                    ), "released too early"
                    for rank in effect.dp_ranks:
                        self.released.setdefault(rank, set()).add(effect.step)
                case _:
                    pass

    # -- the dispatcher itself --------------------------------------------------------------

    @rule(dice=st.integers(0, 4), unheard=st.booleans())
    def crash(self, dice: int, unheard: bool) -> None:
        """The process dies, another goes on from what was noted, and live ranks reconnect."""
        if dice:
            return
        before = self.core
        self.core = Dispatch(before.config)
        self.core.restore(self.memory.remembered())
        self.wanted = None
        assert_same_state(before, self.core)
        self.perform(self.core.tick(self.now))  # as the service does: steps may be outgrown
        for rank, client in self.clients.items():
            known = before.ledger.ranks.get(rank)
            if known is None or known.client_id != client:
                continue
            hello = RankHello(
                client, rank, self.size, self.core.ledger.generation,
                taken=known.taken, committed=known.taken if unheard else known.committed,
                received=dict.fromkeys(self.holds.get(rank, set()), 1),
            )  # fmt: skip
            open_steps = dict(self.core.ledger.steps)
            self.perform(self.core.join(hello, self.now))
            self.count_trained(open_steps)

    def count_trained(self, before: dict[int, OpenStep]) -> None:
        """Count the samples of the steps that were open before and are committed now."""
        for number in before.keys() - self.core.ledger.steps.keys():
            self.trained.update(sample.sample_id for sample in before[number].samples())

    # -- producers ------------------------------------------------------------------------

    @rule(
        producer=st.sampled_from("pq"),
        lengths=st.lists(st.integers(1, 64), min_size=1, max_size=3),
        version=st.one_of(st.none(), st.integers(0, 6)),
    )
    def push(self, producer: str, lengths: list[int], version: int | None) -> None:
        first = self.next_seq[producer]
        samples = tuple(
            make_sample(f"{producer}/{first + at}", tokens, policy_version=version)
            for at, tokens in enumerate(lengths)
        )
        self.send(producer, samples)

    @rule(producer=st.sampled_from("pq"), size=st.integers(2, BATCH), missing=st.integers(0, 1))
    def push_group(self, producer: str, size: int, missing: int) -> None:
        first = self.next_seq[producer]
        samples = tuple(
            make_sample(f"{producer}/{first + at}", group_id=f"g{producer}{first}", group_size=size)
            for at in range(size - missing)
        )
        self.send(producer, samples)

    def send(self, producer: str, samples: tuple[Sample, ...]) -> None:
        first = self.next_seq[producer]
        self.next_seq[producer] += len(samples)
        self.pushes[producer, first] = samples
        self.perform(self.core.push(Push(producer, first, samples), self.now))

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        producer, first = data.draw(st.sampled_from(sorted(self.pushes)))
        samples = self.pushes[producer, first]
        self.core.producer_gone(producer)  # a producer sends again after a reconnect only
        self.perform(self.core.push(Push(producer, first, samples), self.now))

    # -- ranks ----------------------------------------------------------------------------

    @rule(dice=st.integers(0, 9), size=st.sampled_from([2, 2, 1, 3, 4]))
    def new_generation(self, dice: int, size: int) -> None:
        if self.clients and dice:
            return  # rare, so that a generation has time to train
        self.begin_generation(size)

    @precondition(lambda self: self.clients)
    @rule(
        steps=st.integers(1, 2),
        size=st.integers(1, MAX_DP_SIZE),
        answers=st.integers(0, 3),
        crash=st.booleans(),
    )
    def resize_in_mid_run(self, steps: int, size: int, answers: int, crash: bool) -> None:
        """With open steps, as a rule; the dispatcher may die before they are all planned again."""
        for _ in range(steps):
            self.push("p", [3, 9, 4, 7], None)
            for rank in range(self.size):
                self.go_hungry(rank)
            while self.wanted is not None:
                self.answer_the_planner()
            for rank in range(self.size):
                self.prepare(rank)
                following = self.core.ledger.ranks[rank].taken + 1
                if following in self.released.get(rank, set()):
                    self.perform(self.core.demand(rank, following, self.now, hungry=False))
        self.begin_generation(size)
        for _ in range(answers):
            if self.wanted is not None:
                self.answer_the_planner()
        if crash:
            self.crash(dice=0, unheard=False)

    def begin_generation(self, size: int) -> None:
        self.births += 1
        self.holds, self.released, self.clients = {}, {}, {}
        if size != self.size:
            self.digests = {}
        self.size = size
        generation: int | None = None
        for rank in range(size):
            self.clients[rank] = f"{rank}.{self.births}"
            hello = RankHello(self.clients[rank], rank, size, generation)
            self.perform(self.core.join(hello, self.now))
            generation = self.core.ledger.generation

    @precondition(lambda self: self.clients)
    @rule(rank=st.integers(0, MAX_DP_SIZE), size=st.integers(1, MAX_DP_SIZE + 1))
    def a_stranger_joins(self, rank: int, size: int) -> None:
        """Of an older generation, or of a process group of another size."""
        before = self.core.ledger.generation
        hello = RankHello("stranger", rank, size, before)
        if size != self.size:
            with pytest.raises(RankRefused):
                self.core.join(hello, self.now)
        with pytest.raises((GenerationFenced, RankRefused)):
            self.core.join(replace(hello, generation=before - 1), self.now)
        with pytest.raises(RankRefused):
            self.core.join(RankHello("stranger", 0, MAX_DP_SIZE + 1, None), self.now)
        assert (self.core.ledger.generation, self.core.ledger.dp_size) == (before, self.size)

    @precondition(lambda self: self.clients)
    @rule(rank=st.integers(0, MAX_DP_SIZE - 1), same=st.booleans())
    def reconnect(self, rank: int, same: bool) -> None:
        rank %= self.size
        self.perform(self.core.leave(rank, self.clients[rank], self.now))
        if not same:
            self.births += 1
            self.clients[rank] = f"{rank}.{self.births}"
            self.holds[rank], self.released[rank] = set(), set()
        hello = RankHello(self.clients[rank], rank, self.size, self.core.ledger.generation)
        self.perform(self.core.join(hello, self.now))

    def open_steps(self, rank: int) -> list[OpenStep]:
        held = self.holds.get(rank, set())
        return [step for step in self.core.ledger.steps.values() if step.number in held]

    @precondition(lambda self: self.clients)
    @rule(rank=st.integers(0, MAX_DP_SIZE - 1))
    def prepare(self, rank: int) -> None:
        rank %= self.size
        for step in self.open_steps(rank):
            self.perform(self.core.prepared(rank, step.number, step.digest, self.now))

    @precondition(lambda self: self.clients)
    @rule(rank=st.integers(0, MAX_DP_SIZE - 1))
    def go_hungry(self, rank: int) -> None:
        rank %= self.size
        taken = self.core.ledger.ranks[rank].taken
        self.perform(self.core.demand(rank, taken, self.now, hungry=True))

    @precondition(lambda self: self.clients)
    @rule(rank=st.integers(0, MAX_DP_SIZE - 1), count=st.integers(1, 3))
    def train(self, rank: int, count: int) -> None:
        rank %= self.size
        for _ in range(count):
            following = self.core.ledger.ranks[rank].taken + 1
            if following not in self.released.get(rank, set()):
                return
            self.perform(self.core.demand(rank, following, self.now, hungry=False))
            before = dict(self.core.ledger.steps)
            self.perform(self.core.commit(rank, following, self.now))
            self.count_trained(before)

    @precondition(lambda self: self.clients)
    @rule(steps=st.integers(1, 3))
    def all_ranks_train(self, steps: int) -> None:
        for _ in range(steps):
            for rank in range(self.size):
                self.go_hungry(rank)
            self.pass_time(1.0)
            while self.wanted is not None:
                self.answer_the_planner()
            for rank in range(self.size):
                self.prepare(rank)
            for rank in range(self.size):
                self.train(rank, 1)

    # -- planner and clock ------------------------------------------------------------------

    @precondition(lambda self: self.wanted is not None)
    @rule()
    def answer_the_planner(self) -> None:
        wanted, self.wanted = self.wanted, None
        assert wanted is not None
        config = replace(self.plan_config, dp_size=wanted.dp_size)
        answer = plan(wanted.window, config, wanted.take)
        if isinstance(wanted, PlanWanted):
            self.perform(self.core.planned(wanted, answer, self.now))
        else:
            self.perform(self.core.replanned(wanted, answer, self.now))

    @rule(seconds=st.floats(0.1, 30))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.perform(self.core.tick(self.now))
            after = self.core.next_deadline()
            assert after is None or after > self.now, "a tick must do what was due"

    @rule(version=st.integers(0, 8))
    def report_version(self, version: int) -> None:
        self.perform(self.core.set_policy_version(version, self.now))

    @rule(version=st.integers(1, 6), dice=st.integers(0, 5))
    def end_phase(self, version: int, dice: int) -> None:
        if dice == 0:
            self.perform(self.core.end_phase(version, self.now))

    @rule(dice=st.integers(0, 19))
    def end_stream(self, dice: int) -> None:
        if dice == 0:
            self.perform(self.core.end_stream(self.now))

    # -- what always holds ------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        at = self.core.statistics()
        assert at.balanced
        assert at.accepted >= len(self.accepted)  # a held push may be accepted in part
        assert at.samples_committed == sum(self.trained.values())

    @invariant()
    def nothing_is_trained_on_twice(self) -> None:
        assert all(count == 1 for count in self.trained.values())

    @invariant()
    def a_step_for_other_ranks_is_on_its_way_to_a_new_plan(self) -> None:
        assert self.core.ledger.outgrown is None or self.wanted is not None

    @invariant()
    def caps_hold(self) -> None:
        limits = self.core.config.limits
        assert len(self.core.buffer) <= limits.samples
        assert self.core.buffer.held_bytes <= limits.nbytes

    @invariant()
    def nobody_is_passed_over_too_often(self) -> None:
        ready = self.core.buffer.ready(limits := self.core.config.trigger.window)
        assert len(ready) <= limits
        assert all(entry.skips <= MAX_SKIPS for entry in ready)


def assert_same_state(before: Dispatch, after: Dispatch) -> None:
    """A core that was restored stands where the one before it stood."""
    window = before.config.trigger.window
    for core in (before, after):
        assert core.statistics().balanced
    assert [(e.ticket, e.skips, e.group) for e in after.buffer.ready(window)] == [
        (e.ticket, e.skips, e.group) for e in before.buffer.ready(window)
    ]
    assert [group for group, _, _ in after.buffer.open_groups()] == [
        group for group, _, _ in before.buffer.open_groups()
    ]
    assert {n: step.digest for n, step in after.ledger.steps.items()} == {
        n: step.digest for n, step in before.ledger.steps.items()
    }
    assert after.ledger.generation == before.ledger.generation
    assert after.ledger.dp_size == before.ledger.dp_size
    accepted, committed = before.statistics().accepted, before.statistics().samples_committed
    assert after.statistics().accepted == accepted
    assert after.statistics().samples_committed == committed


TestDispatchMachine = DispatchMachine.TestCase
TestDispatchMachine.settings = settings(max_examples=150, stateful_step_count=80, deadline=None)
