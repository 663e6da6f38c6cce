"""The core under any order of events: the books balance and nothing is trained on twice.

A state machine plays producers, ranks, planner and clock against one core, and keeps books of its
own: what was answered `accepted`, and what every committed step held. The clock jumps by hours,
ahead and back, and the core reads it as the dispatcher does, through a `SteadyClock`.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.config import DispatchConfig, SteadyClock
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import (
    Decision,
    Deliver,
    Effect,
    FailRanks,
    PlanRequested,
    PushAnswered,
    Release,
    ReplanRequested,
    Rewound,
    SamplesDropped,
    StepCommitted,
    StepPlanned,
    WithdrawStep,
)
from rollout_dispatcher.core.facts import DropReason, RecoveredState
from rollout_dispatcher.core.planning.trigger import TriggerConfig
from rollout_dispatcher.core.steps.rank_state import CheckpointPosition, RankHello, Unresolved
from rollout_dispatcher.core.steps.step import OpenStep, StepState
from rollout_dispatcher.errors import (
    CheckpointRefused,
    ConfigError,
    GenerationFenced,
    ProtocolError,
    RankRefused,
)
from rollout_dispatcher.payload import InJournal
from rollout_dispatcher.sample import Outcome, Sample
from rollout_planner.cost import parse_cost
from rollout_planner.planner import plan
from rollout_planner.types import Grouping, PlanConfig
from tests.support.core.memory import Memory
from tests.support.core.silence import SHRINKING, sequences
from tests.support.samples import make_sample

pytestmark = SHRINKING
DP_SIZE, BATCH, MAX_SKIPS = 2, 4, 3
STORE = "file:///store"
MAX_DP_SIZE = 4
GROUP_TIMEOUT, PRODUCER_TIMEOUT = 20.0, 30.0


def check_size(dp_size: int) -> None:
    if dp_size > MAX_DP_SIZE:
        raise ConfigError("too many")


class DispatchMachine(RuleBasedStateMachine):
    """Producers `p` and `q`, one to four ranks, and whatever order hypothesis finds."""

    @initialize(
        window=st.sampled_from([4, 6, 8]), capacity=st.sampled_from([8, 12]), retain=st.booleans()
    )
    def start(self, window: int, capacity: int, retain: bool) -> None:
        self.reading = 0.0
        self.clock = SteadyClock(lambda: self.reading)
        self.core = DispatcherCore(
            DispatchConfig(
                dp_size=DP_SIZE,
                limits=BufferLimits(capacity, BATCH, None, 1 << 20, 64, stores=frozenset({STORE})),
                trigger=TriggerConfig(BATCH, window, max_wait=1.0),
                group_timeout=GROUP_TIMEOUT,
                producer_timeout=PRODUCER_TIMEOUT,
                producer_credits=2,
                max_staleness=4,
                durable=True,
                retain=retain,
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
        self.steps_of: dict[int, list[str]] = {}
        self.checkpoints: list[CheckpointPosition] = []
        self.saved = -1
        self.resume: CheckpointPosition | None = None
        self.size = DP_SIZE
        self.wanted: PlanRequested | ReplanRequested | None = None
        #: By step and attempt.
        self.digests: dict[tuple[int, int], str] = {}
        self.content: dict[tuple[int, int], list[str]] = {}
        self.stored: set[str] = set()
        #: By rank: the attempt at each step that it holds.
        self.holds: dict[int, dict[int, int]] = {}
        self.unresolved: set[str] = set()
        self.released: dict[int, set[int]] = {}
        self.clients: dict[int, str] = {}
        self.births = 0
        self.perform(self.core.restore(RecoveredState()))  # a new run notes its name

    @property
    def now(self) -> float:
        """The events of the core."""
        return self.clock()

    # -- what the core asks for ---------------------------------------------------------

    def perform(self, decision: Decision) -> None:
        self.memory.note(decision.facts, decision.totals)
        for effect in decision.effects:
            match effect:
                case PushAnswered():
                    samples = self.pushes[effect.producer, effect.first_seq]
                    for sample, outcome in zip(samples, effect.outcomes, strict=True):
                        if outcome is Outcome.ACCEPTED:
                            assert sample.sample_id not in self.accepted, "accepted twice"
                            self.accepted.add(sample.sample_id)
                case PlanRequested() | ReplanRequested():
                    assert self.wanted is None, "two plans at a time"
                    self.wanted = effect
                case SamplesDropped():
                    gone = effect.dropped.get(DropReason.UNRESOLVED, ())
                    self.unresolved |= {entry.sample.sample_id for entry in gone}
                case Rewound():
                    self.rewound(effect)
                case StepPlanned():
                    assert all(wait >= 0 for wait in effect.waits), "a negative wait"
                case StepCommitted():
                    assert effect.seconds >= 0, "committed before it was planned"
                case _:
                    self.send_to_ranks(effect)
        if self.core._ledger.generation.failed is not None:  # torchrun starts all of them again
            self.begin_generation(self.size)

    def send_to_ranks(self, effect: Effect) -> None:
        match effect:
            case Deliver():
                self.delivered(effect)
            case WithdrawStep():
                for rank in effect.dp_ranks:
                    self.holds.get(rank, {}).pop(effect.step, None)
                    assert effect.step not in self.released.get(rank, set())
            case Release():
                assert all(rank.begun for rank in self.core._ledger.ranks.values())
                attempt = self.core._ledger.steps[effect.step].attempt
                assert all(
                    self.holds.get(rank, {}).get(effect.step) == attempt
                    or self.core._ledger.ranks[rank].committed >= effect.step
                    for rank in range(self.size)
                ), "released too early"
                for rank in effect.dp_ranks:
                    self.released.setdefault(rank, set()).add(effect.step)

    def delivered(self, effect: Deliver) -> None:
        step, held = self.core._ledger.steps[effect.step], self.holds.setdefault(effect.dp_rank, {})
        plan = step.number, step.attempt
        assert step.attempt == effect.attempt
        assert self.digests.setdefault(plan, step.digest) == step.digest, (
            "a redelivered step is not the same"
        )
        names = sorted(sample.sample_id for sample in step.samples())
        assert self.content.setdefault(plan, names) == names, (
            "a step that is planned again for other ranks has other samples"
        )
        assert step.dp_size == self.size, "a step for other ranks is delivered"
        before = held.get(step.number, -1)
        assert before <= step.attempt
        assert before == step.attempt or step.number not in self.released.get(effect.dp_rank, ())
        held[step.number] = step.attempt

    # -- the dispatcher itself --------------------------------------------------------------

    @rule(dice=st.integers(0, 4), unheard=st.booleans())
    def crash(self, dice: int, unheard: bool) -> None:
        """The process dies, another goes on from what was noted, and live ranks reconnect."""
        if dice:
            return
        before = self.core
        self.core = DispatcherCore(before.config)
        self.wanted = None
        self.perform(self.core.restore(self.memory.remembered(), self.now))
        assert_same_state(before, self.core)
        self.perform(self.core.tick(self.now))  # as the service does: steps may be unplanned
        for rank, client in list(self.clients.items()):
            known = before._ledger.ranks.get(rank)
            if known is None or not known.client_id == client == self.clients.get(rank):
                continue
            begun = known.begun  # before that a client has nothing to say
            hello = RankHello(
                client, rank, self.size, self.core._ledger.generation.number,
                taken=known.taken if begun else -1,
                committed=(known.taken if unheard else known.committed) if begun else -1,
                received=dict.fromkeys(self.holds.get(rank, {}), 1),
                attempts=dict(self.holds.get(rank, {})),
                released=max(self.released.get(rank, ()), default=-1),
                resume=self.resume if begun else None,
            )  # fmt: skip
            uncommitted = self.core._ledger.steps.uncommitted()
            self.perform(self.core.join(hello, self.now))
            self.count_trained(uncommitted)

    def count_trained(self, before: list[OpenStep]) -> None:
        """Count the samples of the steps that were open before and are committed now."""
        left = {step.number for step in self.core._ledger.steps.uncommitted()}
        for step in before:
            if step.number not in left:
                self.steps_of[step.number] = [sample.sample_id for sample in step.samples()]
                self.trained.update(self.steps_of[step.number])

    # -- checkpoints ------------------------------------------------------------------------

    @rule()
    def take_a_checkpoint(self) -> None:
        self.checkpoints.append(
            CheckpointPosition(self.core.run_id, self.core._ledger.steps.committed)
        )

    @precondition(lambda self: self.checkpoints and self.clients)
    @rule(data=st.data())
    def report_a_checkpoint_saved(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(self.checkpoints)).step
        if step >= self.core._ledger.steps.next_number:  # what was given again has lost its samples
            with pytest.raises(ProtocolError, match="never planned"):
                self.core.checkpoint_saved(0, step)
            return
        self.perform(self.core.checkpoint_saved(0, step))
        self.perform(self.core.checkpoint_saved(1, 10**6))  # only DP rank 0's word counts
        self.saved = max(self.saved, step)

    @rule(nbytes=st.integers(0, 2_000))
    def leave_room_for_retained_steps(self, nbytes: int) -> None:
        self.perform(self.core.retain_at_most(nbytes))
        assert self.core.retained_bytes <= nbytes

    @precondition(lambda self: self.checkpoints)
    @rule(
        data=st.data(),
        size=st.integers(1, MAX_DP_SIZE),
        twice=st.booleans(),
        die=st.booleans(),
        lossy=st.booleans(),
    )
    def restart_from_a_checkpoint(
        self, data: st.DataObject, size: int, twice: bool, die: bool, lossy: bool
    ) -> None:
        """A new generation loads one, rank by rank; the dispatcher may die in between."""
        position = replace(data.draw(st.sampled_from(self.checkpoints)), allow_lost_steps=lossy)
        self.begin_generation(size)
        steps = self.core._ledger.steps
        if position.step >= steps.next_number:  # what was given again has lost its samples
            with pytest.raises(CheckpointRefused, match="which was withdrawn since"):
                self.load(0, position)
            return
        oldest = self.core._checkpoints.oldest_resume_point
        if self.core.config.retain and position.step < oldest and not lossy:
            with pytest.raises(CheckpointRefused, match=f"one after step {oldest}"):
                self.load(0, position)
            return
        self.load(0, position)
        self.resume = position
        if twice:
            self.load(0, position)
        if die:
            self.crash(0, unheard=False)
        for rank in range(1, self.size):
            self.load(rank, position)
        if self.core.config.retain:
            assert self.core._ledger.steps.committed == max(position.step, oldest)
        assert self.core._ledger.steps.committed >= position.step

    def load(self, rank: int, position: CheckpointPosition) -> None:
        self.holds[rank] = {}
        generation = self.core._ledger.generation.number
        hello = RankHello(self.clients[rank], rank, self.size, generation, resume=position)
        before = self.core._ledger.steps.uncommitted()
        decision = self.core.join(hello, self.now)
        self.count_trained(before)
        self.perform(decision)

    def rewound(self, effect: Rewound) -> None:
        gone = [number for number in self.steps_of if number > effect.after]
        if not self.core.config.retain:
            assert (effect.steps, effect.samples) == (0, 0)
            assert effect.missing == len(gone)
            return
        lost = [number for number in gone if number <= max(self.saved, self.memory.evicted)]
        gone = [number for number in gone if number not in lost]
        assert effect.missing == len(lost)
        assert effect.steps == len(gone)
        assert effect.samples == sum(len(self.steps_of[number]) for number in gone)
        for number in gone:
            self.trained.subtract(self.steps_of.pop(number))

    # -- producers ------------------------------------------------------------------------

    @rule(
        producer=st.sampled_from("pq"),
        lengths=st.lists(st.integers(1, 64), min_size=1, max_size=3),
        version=st.one_of(st.none(), st.integers(0, 6)),
        store=st.sampled_from(["", STORE]),
    )
    def push(
        self, producer: str, lengths: list[int], version: int | None, store: str = STORE
    ) -> None:
        first = self.next_seq[producer]
        samples = tuple(
            make_sample(
                f"{producer}/{first + at}",
                tokens,
                policy_version=version,
                store=store,
                staleness_exempt=version in (None, 0),
            )
            for at, tokens in enumerate(lengths)
        )
        self.send(producer, samples)

    @rule(producer=st.sampled_from("pq"), size=st.integers(2, BATCH), missing=st.integers(0, 1))
    def push_group(self, producer: str, size: int, missing: int) -> None:
        first = self.next_seq[producer]
        samples = tuple(
            make_sample(
                f"{producer}/{first + at}",
                group_id=f"g{producer}{first}",
                group_size=size,
                store=STORE if at else "",
                policy_version=4 if at else None,
                staleness_exempt=not at,
            )
            for at in range(size - missing)
        )
        self.send(producer, samples)

    def send(self, producer: str, samples: tuple[Sample, ...]) -> None:
        first = self.next_seq[producer]
        self.next_seq[producer] += len(samples)
        self.pushes[producer, first] = samples
        self.stored |= {one.sample_id for one in samples if not one.is_in_memory}
        self.perform(self.core.push(self.made(producer, first, samples), self.now))

    def made(self, producer: str, first: int, samples: tuple[Sample, ...]) -> Push:
        refers = any(one.sample_id in self.stored for one in samples)
        return Push(producer, first, samples, has_references=refers)

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        producer, first = data.draw(st.sampled_from(sorted(self.pushes)))
        samples = self.pushes[producer, first]
        # A producer sends again after a reconnect only.
        self.perform(self.core.producer_disconnected(producer, self.now))
        self.core.producer_connected(producer)
        self.perform(self.core.push(self.made(producer, first, samples), self.now))

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
            self.all_go_hungry()
            self.answer_every_plan()
            for rank in range(self.size):
                self.prepare(rank)
                following = self.core._ledger.ranks[rank].taken + 1
                if following in self.released.get(rank, set()):
                    self.perform(self.core.demand(rank, following, self.now, hungry=False))
        self.begin_generation(size)
        for _ in range(answers):
            if self.wanted is not None:
                self.answer_the_planner()
        if crash:
            self.crash(dice=0, unheard=False)

    def begin_generation(self, size: int) -> None:
        if not self.births and size != DP_SIZE:
            with pytest.raises(RankRefused, match="which the first process group of a run must"):
                self.core.join(RankHello("first", 0, size, None), self.now)
            size = DP_SIZE
        self.births += 1
        self.holds, self.released, self.clients = {}, {}, {}
        self.resume = None
        if size != self.size:
            self.digests = {}
        self.size = size
        generation: int | None = None
        for rank in range(size):
            self.clients[rank] = f"{rank}.{self.births}"
            hello = RankHello(self.clients[rank], rank, size, generation)
            self.perform(self.core.join(hello, self.now))
            generation = self.core._ledger.generation.number

    @precondition(lambda self: self.clients)
    @rule(rank=st.integers(0, MAX_DP_SIZE), size=st.integers(1, MAX_DP_SIZE + 1))
    def a_stranger_joins(self, rank: int, size: int) -> None:
        """Of an older generation, or of a process group of another size."""
        before = self.core._ledger.generation.number
        hello = RankHello("stranger", rank, size, before)
        if size != self.size:
            with pytest.raises(RankRefused):
                self.core.join(hello, self.now)
        with pytest.raises((GenerationFenced, RankRefused)):
            self.core.join(replace(hello, generation=before - 1), self.now)
        if rank < self.size == size:
            with pytest.raises(GenerationFenced):
                self.core.join(replace(hello, generation=before - 1), self.now)
        with pytest.raises(RankRefused):
            self.core.join(RankHello("stranger", 0, MAX_DP_SIZE + 1, None), self.now)
        assert (self.core._ledger.generation.number, self.core._ledger.generation.dp_size) == (
            before,
            self.size,
        )

    @precondition(lambda self: self.clients)
    @rule(rank=st.integers(0, MAX_DP_SIZE - 1), same=st.booleans())
    def reconnect(self, rank: int, same: bool) -> None:
        rank %= self.size
        self.perform(self.core.leave(rank, self.clients[rank], self.now))
        if not same:
            self.births += 1
            self.clients[rank] = f"{rank}.{self.births}"
            self.holds[rank], self.released[rank] = {}, set()
        hello = RankHello(self.clients[rank], rank, self.size, self.core._ledger.generation.number)
        self.perform(self.core.join(hello, self.now))

    @precondition(lambda self: self.clients)
    @rule(rank=st.integers(0, MAX_DP_SIZE - 1))
    def prepare(self, rank: int) -> None:
        rank %= self.size
        for number, attempt in list(self.holds.get(rank, {}).items()):
            if number in self.core._ledger.steps:
                self.prepare_one(rank, number, attempt)

    def prepare_one(self, rank: int, number: int, attempt: int) -> None:
        digest = self.digests[number, attempt]
        self.perform(self.core.prepared(rank, number, digest, self.now, attempt=attempt))

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data(), all_of_them=st.booleans(), stale=st.integers(0, 1))
    def lose_samples(self, data: st.DataObject, all_of_them: bool, stale: int) -> None:
        """A rank cannot get samples of a step that it holds; maybe an attempt too late."""
        rank = data.draw(st.sampled_from([at for at, held in self.holds.items() if held]))
        number, attempt = data.draw(st.sampled_from(sorted(self.holds[rank].items())))
        attempt = max(0, attempt - stale)
        names = [one for one in self.content.get((number, attempt), []) if one in self.stored]
        if number not in self.core._ledger.steps or not names:
            return
        names = names if all_of_them else names[:1]
        before = self.core._ledger.steps[number]
        trained = before.state is StepState.RELEASED and before.attempt == attempt
        trained &= self.core._ledger.generation.agrees(self.core._ledger.ranks[rank])
        decision = self.core.unresolved(rank, Unresolved(number, attempt, tuple(names)), self.now)
        assert not trained or any(isinstance(effect, FailRanks) for effect in decision.effects)
        self.perform(decision)

    @precondition(lambda self: self.clients)
    @rule(steps=st.integers(1, 3), empty=st.booleans(), data=st.data())
    def lose_of_several(self, steps: int, empty: bool, data: st.DataObject) -> None:
        """With steps ahead; and the rank's word that it holds the next one is on its way."""
        for _ in range(steps):
            self.push("p", [3, 9, 4, 7], None)
        self.all_go_hungry()
        self.answer_every_plan()
        late = [(rank, *item) for rank, held in self.holds.items() for item in held.items()]
        if late:
            self.lose_samples(data, all_of_them=empty, stale=0)
        for rank, number, attempt in late:
            if number in self.holds.get(rank, {}) and number in self.core._ledger.steps:
                self.prepare_one(rank, number, attempt)

    @precondition(lambda self: self.clients)
    @rule(rank=st.integers(0, MAX_DP_SIZE - 1))
    def go_hungry(self, rank: int) -> None:
        rank %= self.size
        taken = self.core._ledger.ranks[rank].taken
        self.perform(self.core.demand(rank, taken, self.now, hungry=True))

    def all_go_hungry(self) -> None:
        for rank in range(self.size):
            self.go_hungry(rank)

    @precondition(lambda self: self.clients)
    @rule(rank=st.integers(0, MAX_DP_SIZE - 1), count=st.integers(1, 3))
    def train(self, rank: int, count: int) -> None:
        rank %= self.size
        for _ in range(count):
            following = self.core._ledger.ranks[rank].taken + 1
            if following not in self.released.get(rank, set()):
                return
            self.perform(self.core.demand(rank, following, self.now, hungry=False))
            before = self.core._ledger.steps.uncommitted()
            self.perform(self.core.commit(rank, following, self.now))
            self.count_trained(before)
            through = self.core._ledger.steps.committed
            ranks = self.core._ledger.ranks
            assert all(ranks[at].committed >= through for at in range(self.size)), "by all ranks"

    @precondition(lambda self: self.clients)
    @rule(steps=st.integers(1, 3))
    def all_ranks_train(self, steps: int) -> None:
        for _ in range(steps):
            self.all_go_hungry()
            self.pass_time(1.0)
            self.answer_every_plan()
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
        if isinstance(wanted, PlanRequested):
            self.perform(self.core.planned(wanted, answer, self.now))
        else:
            self.perform(self.core.replanned(wanted, answer, self.now))

    def answer_every_plan(self) -> None:
        while self.wanted is not None:
            self.answer_the_planner()

    @rule(seconds=st.floats(0.1, 30))
    def pass_time(self, seconds: float) -> None:
        self.reading += seconds
        self.tick_if_due()

    def tick_if_due(self) -> bool:
        deadline = self.core.next_deadline()
        if deadline is None or deadline > self.now:
            return False
        self.perform(self.core.tick(self.now))
        after = self.core.next_deadline()
        assert after is None or after > self.now, "a tick must do what was due"
        return True

    @rule(seconds=st.floats(60, 100_000), dice=st.integers(0, 4))
    def jump_ahead(self, seconds: float, dice: int) -> None:
        """This looks like time that passed: a group whose producer is gone is over."""
        if dice:
            return
        self.perform(self.core.producer_disconnected("q", self.now))
        before = self.core._totals.dropped[DropReason.INCOMPLETE_GROUP]
        waiting = sum(
            len(group.entries)
            for group in self.core._buffer.groups
            if "p" not in group.contributors or "p" not in self.core._parts.producers
        )
        self.reading += seconds
        while self.tick_if_due():
            pass
        if seconds > 2 * PRODUCER_TIMEOUT + GROUP_TIMEOUT:
            assert self.core._totals.dropped[DropReason.INCOMPLETE_GROUP] - before >= waiting
        self.core.producer_connected("q")

    @rule(seconds=st.floats(60, 100_000), dice=st.integers(0, 4))
    def jump_back(self, seconds: float, dice: int) -> None:
        """Nothing comes of it, and nothing that is waited for comes later."""
        if dice:
            return
        now, deadline = self.now, self.core.next_deadline()
        self.reading -= seconds
        assert self.now == now
        assert self.core.next_deadline() == deadline
        if deadline is not None and deadline > now:
            self.reading += deadline - now
            self.reading += 1e-6  # a sum of floats may fall short
            assert self.tick_if_due(), "the wait is as long as it was"

    @rule(version=st.integers(0, 8))
    def report_version(self, version: int) -> None:
        first_step = self.core._ledger.steps.committed + 1
        self.perform(self.core.set_policy_version(version, self.now, first_step))

    @rule(
        version=st.integers(1, 6),
        producer=st.sampled_from("pq"),
        force=st.booleans(),
        dice=st.integers(0, 5),
    )
    def end_phase(self, version: int, producer: str, force: bool, dice: int) -> None:
        if dice == 0:
            self.perform(self.core.end_phase(version, self.now, producer, force=force))

    @rule(producer=st.sampled_from("pq"), force=st.booleans(), dice=st.integers(0, 19))
    def end_stream(self, producer: str, force: bool, dice: int) -> None:
        if dice == 0:
            self.perform(self.core.end_stream(self.now, producer, force=force))

    # -- what always holds ------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        at = self.core.statistics()
        assert at.balanced
        assert at.accepted >= len(self.accepted)  # a held push may be accepted in part
        assert at.samples_committed - at.samples_rewound == sum(self.trained.values())
        assert (
            at.samples_retained
            == sum(
                len(names)
                for number, names in self.steps_of.items()
                if number > max(self.saved, self.memory.evicted)
            )
            * self.core.config.retain
        )

    @invariant()
    def nothing_is_trained_on_twice(self) -> None:
        assert all(count <= 1 for count in self.trained.values())
        assert all(count >= 0 for count in self.trained.values())
        assert not any(self.trained[name] for name in self.unresolved), "lost, and trained on"

    @invariant()
    def a_step_without_samples_is_none(self) -> None:
        assert all(step.num_samples for step in self.core._ledger.steps.uncommitted())

    @invariant()
    def what_only_the_journal_has_can_be_read_back(self) -> None:
        steps = self.core._ledger.steps.uncommitted()
        for entry in (entry for step in steps for entry in step.entries()):
            if isinstance(entry.sample.payload, InJournal):
                assert self.memory.payload(entry.ticket)
        assert len(self.core._ledger.steps) <= self.core.config.max_open_steps

    @invariant()
    def a_step_for_other_ranks_is_on_its_way_to_a_new_plan(self) -> None:
        assert self.core._ledger.unplanned is None or self.wanted is not None

    @invariant()
    def caps_hold(self) -> None:
        limits = self.core.config.limits
        assert self.core._buffer.held.nbytes <= limits.nbytes
        held = self.core._admission.blocked
        assert held.nbytes <= limits.held_bytes or len(held) == 1
        assert held.nbytes == sum(sample.memory_bytes for push in held for sample in push.waiting)
        assert self.core._buffer.ready_units == self.core._buffer.num_ready

    @invariant()
    def nobody_is_passed_over_too_often(self) -> None:
        ready = self.core._buffer.ready(limits := self.core.config.trigger.window)
        assert len(ready) <= limits
        assert all(entry.skips <= MAX_SKIPS for entry in ready)


def assert_same_state(before: DispatcherCore, after: DispatcherCore) -> None:
    """A core that was restored stands where the one before it stood."""
    window = before.config.trigger.window
    for core in (before, after):
        assert core.statistics().balanced
    assert [(e.ticket, e.skips, e.group) for e in after._buffer.ready(window)] == [
        (e.ticket, e.skips, e.group) for e in before._buffer.ready(window)
    ]
    groups = [(group.group_id, group.tickets) for group in before._buffer.groups if group.entries]
    ends = before._parts.ends
    if any(
        map(ends.is_decided, ends.pending(1))
    ):  # what was held back is gone: groups that lack it, too
        groups = [
            found for found in groups if found[0] in {g.group_id for g in after._buffer.groups}
        ]
    assert [(group.group_id, group.tickets) for group in after._buffer.groups] == groups
    steps, others = after._ledger.steps, before._ledger.steps
    assert [(step.number, step.digest, step.attempt) for step in steps.uncommitted()] == [
        (step.number, step.digest, step.attempt) for step in others.uncommitted()
    ]
    assert (steps.next_number, steps.withdrawn) == (others.next_number, others.withdrawn)
    assert after._ledger.generation.number == before._ledger.generation.number
    assert after._ledger.generation.dp_size == before._ledger.generation.dp_size
    assert after._ledger.generation.resumed == before._ledger.generation.resumed
    for name in ("accepted", "samples_committed", "samples_rewound", "samples_retained", "run_id"):
        assert getattr(after.statistics(), name) == getattr(before.statistics(), name)


TestDispatchMachine = DispatchMachine.TestCase
TestDispatchMachine.settings = sequences(40, steps=80)
