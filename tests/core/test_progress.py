"""Nothing waits for itself: under a fair schedule every accepted sample is done with, in so many
events.

A state machine lets producers push groups in any order, stop, leave and die, over buffers of every
tightness. Then the schedule becomes fair: ranks ask for steps and commit them, the planner answers,
the journal syncs, the clock runs, and producers that live go on pushing what they have. After a
number of rounds that is stated below nothing is left but what a living producer has not finished.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.admission.eligibility import HARD_CAPS
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import (
    Decision,
    PayloadsToJournal,
    PlanRequested,
    PushAnswered,
    PushBlocked,
    ReplanRequested,
    ResendRequested,
)
from rollout_dispatcher.core.planning.trigger import TriggerConfig
from rollout_dispatcher.core.steps.rank_state import RankHello, Unresolved
from rollout_dispatcher.payload import Reference
from rollout_dispatcher.sample import SIZE_AT_CLOSE, DType, Field, Outcome, Sample, Schema
from rollout_planner.cost import parse_cost
from rollout_planner.planner import plan
from rollout_planner.types import PlanConfig
from tests.support.core.rules import Rules, all_entries
from tests.support.core.silence import SHRINKING, assert_silent, is_due, sequences
from tests.support.samples import IDS, make_sample

pytestmark = SHRINKING
BATCH, TOKENS = 4, 4
#: Tokens of some samples: plans of these and others are not even, so trials miss.
SHORT = TOKENS // 2
#: Of the same size, so that the caps mean the same.
OTHERS = [Schema((Field(name, DType.INT64),)) for name in ("b", "c")]
_schemas = st.sampled_from([IDS, IDS, *OTHERS])
SAMPLE_BYTES = 8 * TOKENS
#: Where payloads are, by turns: as they come, or in a payload store.
_stores = st.sampled_from([[""], ["files"], ["", "files"]])
CREDITS = 3
GROUP_TIMEOUT, PRODUCER_TIMEOUT, MAX_WAIT = 20.0, 30.0, 1.0
#: Rounds of a fair schedule for each sample that was ever pushed: it is pushed or let in, it may
#: be recalled, its group may be given up for want of room, it is planned and it is committed.
ROUNDS_A_SAMPLE = 6
#: Rounds beyond: until the dead are given up, and their groups.
ROUNDS_BEYOND = 40


@dataclass
class Producer:
    """todo: what it has still to push. waiting: pushes without an answer, by number."""

    todo: deque[Sample] = field(default_factory=deque)
    waiting: dict[int, tuple[Sample, ...]] = field(default_factory=dict)
    next_seq: int = 0
    alive: bool = True


class Progress(RuleBasedStateMachine):
    """Three producers, two ranks, a planner, and a journal that syncs when it likes."""

    @initialize(drawn=st.data())
    def start(self, drawn: st.DataObject) -> None:
        """Buffers of every tightness: soft caps, memory, memory of held pushes, payload stores."""
        samples = drawn.draw(st.sampled_from([4, 6]), "ready samples or groups")
        tokens = drawn.draw(st.sampled_from([None, TOKENS, 5 * TOKENS]), "ready tokens")
        room = drawn.draw(st.sampled_from([1, 2, 5, 100]), "samples in memory")
        held = drawn.draw(st.sampled_from([1, 3, 100]), "samples of held pushes in memory")
        stored = drawn.draw(st.sampled_from([1, 2, 5, 100]), "samples in payload stores")
        durable, keep, by_groups = (drawn.draw(st.booleans()) for _ in range(3))
        self.now = 0.0
        group = None if by_groups else BATCH
        limits = BufferLimits(
            samples, group, tokens, room * SAMPLE_BYTES, TOKENS, held * SAMPLE_BYTES,
            stores=frozenset({"files"}), referenced_bytes=stored * SAMPLE_BYTES,
        )  # fmt: skip
        self.core = DispatcherCore(
            DispatchConfig(
                dp_size=2,
                limits=limits,
                trigger=TriggerConfig(BATCH, samples, MAX_WAIT),
                by_groups=by_groups,
                keep_incomplete=keep,
                durable=durable,
                group_timeout=GROUP_TIMEOUT,
                producer_timeout=PRODUCER_TIMEOUT,
                producer_credits=CREDITS,
                reports_accepted=True,
                **self.settings(drawn),  # type: ignore[arg-type]
            )
        )
        self.plan_config = PlanConfig(
            dp_size=2,
            dispatch_batch_size=BATCH,
            by_groups=by_groups,
            cost=parse_cost("tokens", lambda _: ""),
            micro_batch_tokens=64,
        )
        self.producers = {name: Producer() for name in "pqr"}
        self.groups = self.pushed = 0
        self.accepted: set[str] = set()
        self.recalled: deque[ResendRequested] = deque()
        self.to_journal: deque[PayloadsToJournal] = deque()
        self.wanted: PlanRequested | ReplanRequested | None = None
        self.books = Rules(self.core)
        self.held: set[tuple[str, int]] = set()
        self.demands: dict[int, tuple[int, bool]] = {}
        ahead = drawn.draw(st.sampled_from([1, 0, 2]), "prefetched steps")
        self.perform(self.core.join(RankHello("0", 0, 2, None, ahead), self.now))
        self.perform(self.core.join(RankHello("1", 1, 2, 1, ahead), self.now))

    def settings(self, drawn: st.DataObject) -> dict[str, object]:  # noqa: ARG002
        """What else is configured; for other machines."""
        return {}

    def perform(self, decision: Decision) -> None:
        """Carry out what was decided; then there is nothing left to decide."""
        self.carry_out(decision)
        if is_due(self.core, self.now):
            self.carry_out(self.core.tick(self.now))
            assert not is_due(self.core, self.now), "a tick must do what was due"
        assert_silent(self.core, self.now)

    def carry_out(self, decision: Decision) -> None:
        self.books.check(decision, self.now)
        for effect in decision.effects:
            match effect:
                case PlanRequested() | ReplanRequested():
                    assert self.wanted is None
                    self.wanted = effect
                case PayloadsToJournal():
                    self.to_journal.append(effect)
                case PushAnswered(producer=""):
                    pass  # over HTTP, where a client that is answered `full` may stay away
                case PushAnswered():
                    self.answered(effect)
                case PushBlocked():
                    assert effect.first_seq in self.producers[effect.producer].waiting
                    self.held.add((effect.producer, effect.first_seq))
                case ResendRequested():
                    self.recalled.append(effect)

    def answered(self, answer: PushAnswered) -> None:
        producer = self.producers[answer.producer]
        samples = producer.waiting.pop(answer.first_seq)
        mine = {first for name, first in self.held if name == answer.producer}
        was_held = answer.first_seq in mine
        self.held.discard((answer.producer, answer.first_seq))
        others = [(first, producer.waiting[first]) for first in self.line(answer)]
        for sample, outcome in zip(samples, answer.outcomes, strict=True):
            if outcome is Outcome.ACCEPTED:
                assert sample.sample_id not in self.accepted, "accepted twice"
                self.accepted.add(sample.sample_id)
            elif outcome is Outcome.FULL:
                assert not was_held, "who waits is not sent away"
                assert len(mine) == CREDITS, "sent away with credits left"
                producer.todo.append(sample)
        assert not was_held or "closed" not in answer.reasons.values(), "it came before the end"
        if was_held and Outcome.ACCEPTED in answer.outcomes:
            for first, push in others:
                assert first > answer.first_seq or not _alike(push, samples), "overtaken"

    def line(self, answer: PushAnswered) -> set[int]:
        """Numbers of this producer's pushes that were held before and are still, with payload."""
        held = self.core._admission.blocked
        return {
            push.first_seq for push in held.of_producer(answer.producer) if not push.payload_evicted
        }

    # -- anything may happen ----------------------------------------------------------------

    @rule(
        sizes=st.lists(st.integers(1, BATCH), min_size=1, max_size=4),
        by=st.lists(st.sampled_from("pqr"), min_size=1, max_size=2),
        lacking=st.sampled_from([0, 0, 0, 1]),
        order=st.randoms(use_true_random=False),
        at_close=st.booleans(),
        schema=_schemas,
        stores=_stores,
    )
    def begin_groups(  # noqa: PLR0917
        self, sizes: list[int], by: list[str], lacking: int, order: object, at_close: bool,
        schema: Schema, stores: list[str],
    ) -> None:  # fmt: skip
        """Prompts whose rollouts finish in any order, and of which one may never finish."""
        members: list[Sample] = []
        for size in sizes:
            self.groups += 1
            size_sent = SIZE_AT_CLOSE if at_close else size
            members += [
                make_sample(
                    f"{self.groups}.{at}",
                    TOKENS,
                    schema=schema,
                    group_id=f"{self.groups}",
                    group_size=size_sent,
                    store=stores[at % len(stores)],
                )
                for at in range(size - (lacking if size > 1 else 0))
            ]
        order.shuffle(members)  # type: ignore[attr-defined]
        for at, sample in enumerate(members):
            producer = self.producers[by[at % len(by)]]
            if producer.alive:
                producer.todo.append(sample)

    @rule(
        by=st.sampled_from("pqr"),
        lengths=st.lists(st.sampled_from([TOKENS, SHORT]), min_size=1, max_size=5),
        schema=_schemas,
        stores=_stores,
    )
    def begin_plain(self, by: str, lengths: list[int], schema: Schema, stores: list[str]) -> None:
        for at, tokens in enumerate(lengths if self.producers[by].alive else []):
            self.groups += 1
            store = stores[at % len(stores)]
            sample = make_sample(f"{self.groups}.{at}", tokens, schema=schema, store=store)
            self.producers[by].todo.append(sample)

    @rule(by=st.sampled_from("pqr"), count=st.integers(1, 3))
    def push_some(self, by: str, count: int) -> None:
        producer = self.producers[by]
        if not producer.alive or not producer.todo:
            return
        samples = tuple(producer.todo.popleft() for _ in range(min(count, len(producer.todo))))
        first, producer.next_seq = producer.next_seq, producer.next_seq + len(samples)
        producer.waiting[first] = samples
        self.pushed += len(samples)
        self.books.latest = by, first
        self.perform(self.core.push(_push(by, first, samples), self.now))

    @rule(by=st.sampled_from("pqr"), for_good=st.booleans())
    def stop(self, by: str, for_good: bool) -> None:
        """A producer dies or leaves, in the middle of what it had to push."""
        producer = self.producers[by]
        producer.alive = False
        producer.todo.clear()
        producer.waiting.clear()
        self.held -= {(name, first) for name, first in self.held if name == by}
        self.books.pushing.discard(by)
        self.perform(self.core.producer_disconnected(by, self.now, for_good=for_good))

    @rule(by=st.sampled_from("pqr"), force=st.booleans(), dice=st.integers(0, 7))
    def end_the_stream(self, by: str, force: bool, dice: int) -> None:
        """Early, as a rule: what waits comes in, and what comes later is refused."""
        if dice == 0 and self.producers[by].alive:
            self.announce_end(by, force=force)

    def announce_end(self, by: str, *, force: bool = False) -> None:
        self.books.ends_stream(by, force=force)
        self.perform(self.core.end_stream(self.now, by, force=force))

    @rule(by=st.sampled_from("pqr"))
    def reconnect(self, by: str) -> None:
        """A producer loses its connection, and pushes again what has no answer, in order."""
        producer = self.producers[by]
        if not producer.alive or not producer.waiting:
            return
        self.held -= {(name, first) for name, first in self.held if name == by}
        self.recalled = deque(asked for asked in self.recalled if asked.producer != by)
        self.perform(self.core.producer_disconnected(by, self.now))
        self.perform(self.core.producer_connected(by))
        for first, samples in sorted(producer.waiting.items()):
            self.perform(self.core.push(_push(by, first, samples), self.now))

    @rule(group=st.integers(1, 9), keep=st.sampled_from([None, True, False]))
    def close_a_group(self, group: int, keep: bool | None) -> None:
        self.perform(self.core.close_group(f"{group}", self.now, keep=keep))

    @rule()
    def send_again(self) -> None:
        """What was asked for again; no more than once each, however often that may be."""
        for _ in range(len(self.recalled)):
            asked = self.recalled.popleft()
            samples = self.producers[asked.producer].waiting.get(asked.first_seq)
            if samples is not None:  # else it has died since
                push = _push(asked.producer, asked.first_seq, samples)
                self.perform(self.core.push(push, self.now))

    @rule()
    def sync(self) -> None:
        while self.to_journal:
            effect = self.to_journal.popleft()
            self.perform(self.core.payloads_durable(effect.entries, self.now))

    @rule()
    def answer_the_planner(self) -> None:
        wanted, self.wanted = self.wanted, None
        if wanted is None:
            return
        again = isinstance(wanted, ReplanRequested)
        answer = plan(wanted.window, self.plan_config, wanted.take, whole=again)
        if isinstance(wanted, ReplanRequested):
            decision = self.core.replanned(wanted, answer, self.now)
        else:
            decision = self.core.planned(wanted, answer, self.now)
        self.books.answered(wanted, decision)
        self.perform(decision)

    @rule(rank=st.integers(0, 1), which=st.integers(0, 2), count=st.integers(1, BATCH))
    def lose_samples(self, rank: int, which: int, count: int) -> None:
        """A rank cannot get samples of an open step: those of a group go together."""
        steps = [step for step in self.core._ledger.steps.values() if step.digest][which:]
        for step in steps[:1]:
            stored = [s.sample_id for s in step.samples() if isinstance(s.payload, Reference)]
            if stored:
                missing = Unresolved(step.number, step.attempt, tuple(stored[:count]))
                self.perform(self.core.unresolved(rank, missing, self.now))

    @rule()
    def train(self) -> None:
        """Both ranks prepare, take and commit what they were given, and ask for more."""
        for number, step in list(self.core._ledger.steps.items()):
            ranks = self.core._ledger.ranks.values()
            if not step.digest or any(number in rank.unresolved for rank in ranks):
                break  # it is to be planned again, once all ranks have reported where they resume
            for rank in (0, 1):
                self.perform(
                    self.core.prepared(rank, number, step.digest, self.now, attempt=step.attempt)
                )
            for rank in (0, 1):
                self.demand(rank, number, hungry=False)
            for rank in (0, 1):
                self.perform(self.core.commit(rank, number, self.now))
        for rank in (0, 1):
            taken = self.core._ledger.ranks[rank].taken
            self.demand(rank, taken, hungry=True)

    def demand(self, rank: int, taken: int, *, hungry: bool) -> None:
        """A rank says where it is, once: nobody is woken by hearing it again."""
        if self.demands.get(rank) != (taken, hungry):
            self.demands[rank] = taken, hungry
            self.perform(self.core.demand(rank, taken, self.now, hungry=hungry))

    @rule(seconds=st.sampled_from([0.3, 1.1, 5.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.perform(self.core.tick(self.now))
        self.now = end

    # -- what always holds ------------------------------------------------------------------

    @invariant()
    def memory_is_bounded(self) -> None:
        limits, held = self.core.config.limits, self.core._admission.blocked
        assert self.core._buffer.held.nbytes <= limits.nbytes
        assert self.core._buffer.held.referenced <= limits.referenced_bytes
        with_payload = [push for push in held if any(one.is_in_memory for one in push.waiting)]
        assert held.nbytes <= limits.held_bytes or len(with_payload) == 1

    @invariant()
    def who_waits_has_a_reason(self) -> None:
        """A push is held at a soft cap only while a step could be planned."""
        pressed = self.core._capacity.blocking_cap
        if len(self.core._admission.blocked) and self.core._capacity.units_short() > 0:
            held = self.core._admission.blocked
            waits = [push for push in held if not push.payload_evicted]
            assert not waits or (pressed is not None and pressed.cap in HARD_CAPS)

    @invariant()
    def the_books_balance(self) -> None:
        at = self.core.statistics()
        assert at.balanced
        assert at.open_group_samples + at.ready == at.buffered

    @invariant()
    def a_step_has_one_schema_and_the_run_too(self) -> None:
        steps = self.core._ledger.steps
        schemas = {sample.schema for number in steps for sample in steps[number].samples()}
        schemas |= {entry.sample.schema for entry in all_entries(self.core)}
        decided = self.core.schema
        assert schemas <= (set() if decided is None else {decided[0]})

    # -- and in the end ---------------------------------------------------------------------

    def teardown(self) -> None:
        """A fair schedule: everybody who lives gets its turn, again and again."""
        if not hasattr(self, "core"):
            return
        pushed = self.pushed + sum(len(producer.todo) for producer in self.producers.values())
        self.be_fair(ROUNDS_A_SAMPLE * pushed + ROUNDS_BEYOND, until_nobody_pushes=True)
        for name, producer in self.producers.items():
            assert not producer.todo, "a producer that lives gets rid of all it has"
            assert not producer.waiting, "and has all of it answered"
            if producer.alive:
                self.announce_end(name)
        if not any(producer.alive for producer in self.producers.values()):
            self.announce_end("", force=True)  # a controller's word
        self.be_fair(ROUNDS_A_SAMPLE * pushed + ROUNDS_BEYOND, until_nobody_pushes=False)
        at = self.core.statistics()
        assert at.buffered == at.in_flight == 0, self.core.waits_for(self.now)
        assert at.run_state in ("drained", "running")
        assert at.accepted == at.samples_committed + sum(at.dropped.values())

    def be_fair(self, rounds: int, *, until_nobody_pushes: bool) -> None:
        for _ in range(rounds):
            for name in self.producers:
                self.push_some(name, 3)
            self.send_again()
            self.sync()
            self.answer_the_planner()
            self.train()
            self.pass_time(1.1)
            pushing = any(p.todo or p.waiting for p in self.producers.values())
            if until_nobody_pushes and not pushing:
                return


def _alike(push: tuple[Sample, ...], other: tuple[Sample, ...]) -> bool:
    """Whether nothing but the line decides between these: no groups, one size, one place."""
    found = {(sample.group_id, sample.nbytes, sample.is_in_memory) for sample in [*push, *other]}
    return len(found) == 1 and next(iter(found))[0] is None


def _push(by: str, first: int, samples: tuple[Sample, ...]) -> Push:
    refers = any(not sample.is_in_memory for sample in samples)
    return Push(by, first, samples, has_references=refers)


TestProgress = Progress.TestCase
TestProgress.settings = sequences(40, steps=40)
