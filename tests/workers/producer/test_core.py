"""What a producer says, when: credits, floors, repeats, and nothing pushed twice."""

from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_dispatcher.errors import ProtocolError, SampleRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import JOINED_BYTES
from rollout_dispatcher.sample import Outcome
from rollout_workers.producer.core import ProducerCore, Settled
from rollout_workers.producer.encode import EncodedSample, Encoder, RolloutSample
from rollout_workers.producer.pushes import batches
from tests.support.examples import scaled
from tests.workers.producer.cores import (
    connect,
    connected,
    encoded,
    hear,
    pushed,
    pushes,
    said,
)


def unconnected() -> ProducerCore:
    """It has lost its connection."""
    core = connected()
    core.lost()
    return core


def test_members_of_a_group_go_beyond_the_credits_once() -> None:
    core = connected(credits=1)
    core.submit([encoded()])
    core.submit([encoded()])
    core.submit([encoded(group_id="g", size=2)])
    assert pushes(core) == [0, 2]
    assert hear(core, pushed(2, "full")) == []
    assert pushes(core) == []
    hear(core, pushed(0, "accepted"))
    assert pushes(core) == [1]
    hear(core, pushed(1, "accepted"))
    assert pushes(core) == [2]


def test_full_although_a_credit_is_free_waits_a_little_longer_every_time() -> None:
    core = connected(credits=1)
    core.submit([encoded()])
    now, waits = 0.0, []
    for _ in range(8):
        assert pushes(core, now) == [0]
        hear(core, pushed(0, "full"), now)
        wait = core.wait(now)
        assert wait is not None
        assert pushes(core, now + wait * 0.99) == []
        waits.append(wait)
        now += wait
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


def test_the_floor_is_the_smallest_number_that_may_come_again() -> None:
    core = connected(credits=1)
    for _ in range(3):
        core.submit([encoded(), encoded()])
    assert [message.floor for message in said(core) if isinstance(message, m.Push)] == [0]
    hear(core, pushed(0, "accepted", "duplicate"))
    assert [message.floor for message in said(core) if isinstance(message, m.Push)] == [2]


def test_a_duplicate_of_an_own_number_was_accepted_before() -> None:
    core = connected()
    core.submit([encoded()])
    core.submit([encoded(sample_id="mine")])
    said(core)
    assert hear(core, pushed(0, "duplicate")) == [Settled(0, (Outcome.ACCEPTED,))]
    assert hear(core, pushed(1, "duplicate")) == [Settled(1, (Outcome.DUPLICATE,))]


def test_a_push_that_is_full_in_part_keeps_the_answers_it_has() -> None:
    core = connected(credits=1)
    core.submit([encoded(sample_id="a"), encoded(sample_id="b"), encoded(sample_id="c")])
    said(core)
    found = [Outcome.ACCEPTED, Outcome.REFUSED, Outcome.FULL]
    refusal = m.Pushed(first_seq=0, outcomes=found, errors={"1": "no"})
    assert hear(core, refusal) == []
    assert pushes(core, 1.0) == [0]
    (settled,) = hear(core, pushed(0, "duplicate", "refused", "accepted"), 1.0)
    assert settled.outcomes[::2] == (Outcome.ACCEPTED, Outcome.ACCEPTED)
    assert str(settled.outcomes[1]) == "no"


def test_an_abandoned_push_is_withdrawn_only_if_it_is_certainly_not_held() -> None:
    core = connected(credits=1)
    core.submit([encoded()])
    core.submit([encoded()])
    said(core)
    blocked = m.Blocked(first_seq=0, cap="tokens", held=9, capacity=9)
    hear(core, blocked)
    assert core.abandon(0, 0.0) == (False, blocked)
    assert core.abandon(1, 0.0) == (True, blocked)  # behind the other, it waits for the same
    core.lost()
    core.lost()  # a second connection, on which it was not sent
    assert core.abandon(0, 0.0) == (False, None)  # there may be no dispatcher any more
    connect(core, credits=1)
    assert core.abandon(0, 0.0) == (False, blocked)
    assert pushes(core) == [0]
    hear(core, pushed(0, "full"))
    assert core.abandon(0, 0.0) == (True, blocked)
    assert pushes(core, 1.0) == []


def test_what_the_dispatcher_does_not_read_yet_is_blocked_whichever_push_it_is() -> None:
    core = connected(credits=2)
    for _ in range(3):
        core.submit([encoded()])
    said(core)
    held = m.Blocked(first_seq=1, cap="samples", held=9, capacity=9)
    unread = m.Blocked(cap="receive-bytes", held=9, capacity=9)
    for message in (held, unread):
        hear(core, message)
    assert [core.abandon(first, 0.0) for first in range(3)] == [
        (False, unread), (False, held), (True, unread),
    ]  # fmt: skip


def test_a_push_that_stays_without_a_caller_keeps_a_copy_of_his_arrays() -> None:
    core = connected(credits=1, max_payload_bytes=1 << 30)
    ids = np.arange(JOINED_BYTES)
    core.submit(Encoder().encode([RolloutSample({"input_ids": ids})]))
    ((_, lent),) = core.take_messages(0.0)
    core.abandon(0, 0.0)
    before = ids.tobytes()
    ids[:] = 0
    assert b"".join(lent) == ids.tobytes()
    core.lost()
    connect(core, credits=1, max_payload_bytes=1 << 30)
    ((_, kept),) = core.take_messages(0.0)
    assert b"".join(kept) == before


def test_a_control_waits_for_the_pushes_it_is_about_and_for_its_pong() -> None:
    core = connected(credits=1)
    core.submit([encoded()])
    ticket = core.control(m.EndPhase(policy_version=3))
    core.submit([encoded()])
    assert pushes(core) == [0]
    hear(core, pushed(0, "accepted"))
    assert [type(message) for message in said(core)] == [m.Push, m.EndPhase, m.Ping]
    assert hear(core, m.Pong()) == [Settled(ticket)]


def test_closing_a_group_waits_for_its_own_members_only() -> None:
    core = connected(credits=1)
    core.submit([encoded()])
    core.submit([encoded(group_id="g", size=4)])
    core.control(m.CloseGroup(group_id="g"))
    assert pushes(core) == [0, 1]
    hear(core, pushed(1, "accepted"))
    assert said(core)[:1] == [m.CloseGroup(group_id="g", number=1)]


def test_an_unconfirmed_control_is_said_again_on_the_next_connection() -> None:
    core = connected()
    core.ping()
    core.control(m.EndStream())
    assert said(core) == [m.EndStream(), m.Ping()]
    assert hear(core, m.Pong()) == []
    core.lost()
    connect(core)
    assert said(core) == [m.EndStream(), m.Ping()]


def test_what_no_dispatcher_takes_is_refused_before_it_has_a_number() -> None:
    core = connected(max_payload_bytes=64)
    with pytest.raises(SampleRefused, match="exceed the dispatcher's frame limit of 64 bytes"):
        core.submit([encoded(tokens=9)])
    with pytest.raises(SampleRefused, match=r"sample_id is .*: String should have at most 128"):
        core.submit([encoded(sample_id="x" * 200)])
    with pytest.raises(SampleRefused, match="group_size is -1; write how many"):
        core.submit([encoded(group_id="g", size=-1)])
    core.submit([encoded()])
    assert pushes(core) == [0]


def test_batches_break_where_one_push_cannot_go_on() -> None:
    plain, named, wide = encoded(), encoded(sample_id="a"), encoded(tokens=4)
    unsized, sized = encoded(group_id="g"), encoded(group_id="g", size=2)
    two_fields = Encoder().encode([RolloutSample({"input_ids": [1], "x": [1]})])[0]

    def sizes(*samples: EncodedSample) -> list[int]:
        return [len(batch) for batch in batches(samples, 48)]

    assert sizes() == []
    assert sizes(plain, plain, named, named, plain) == [2, 2, 1]
    assert sizes(plain, two_fields, plain) == [1, 1, 1]
    assert sizes(wide, wide, plain, plain) == [1, 3]
    assert sizes(encoded(tokens=99), plain) == [1, 1]
    assert sizes(plain, sized, unsized) == [2, 1]


class Model(RuleBasedStateMachine):
    """A dispatcher that accepts, holds, refuses room and loses connections as it likes.

    Each direction of the connection is a queue that a loss empties. Whatever happens, every
    sample is accepted exactly once in the end and its caller is told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.core = ProducerCore("me")
        self.now = 0.0
        self.online = False
        self.floor = 0
        self.inbound: deque[m.Push] = deque()
        self.held: list[m.Push] = []
        self.outbound: deque[m.Pushed] = deque()
        self.accepted: set[int] = set()
        self.submitted: set[int] = set()
        self.settled: set[int] = set()
        self.credits = 2

    @rule(size=st.integers(1, 3), grouped=st.booleans())
    def submit(self, size: int, grouped: bool) -> None:
        if not self.core.max_payload_bytes:
            return
        group = "g" if grouped else None
        self.submitted.add(
            self.core.submit([encoded(group_id=group, size=9 if group else None)] * size)
        )
        self.pump()

    @precondition(lambda self: not self.online)
    @rule()
    def connect(self) -> None:
        self.online = True
        connect(self.core, credits=self.credits)
        self.pump()

    @precondition(lambda self: self.online)
    @rule()
    def lose(self) -> None:
        self.online = False
        for queue in (self.inbound, self.held, self.outbound):
            queue.clear()
        self.core.lost()

    @precondition(lambda self: self.inbound)
    @rule(may_hold=st.booleans())
    def receive(self, may_hold: bool) -> None:
        push = self.inbound.popleft()
        assert push.first_seq >= self.floor, "a number below a floor came again"
        self.floor = max(self.floor, push.floor)
        if may_hold and len(self.held) < self.credits:
            self.held.append(push)
        else:
            self.outbound.append(pushed(push.first_seq, *["full"] * len(push.tokens)))

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 9))
    def accept(self, at: int) -> None:
        push = self.held.pop(at % len(self.held))
        numbers = range(push.first_seq, push.first_seq + len(push.tokens))
        words = ["duplicate" if n in self.accepted else "accepted" for n in numbers]
        self.accepted.update(numbers)
        self.outbound.append(pushed(push.first_seq, *words))

    @precondition(lambda self: self.outbound)
    @rule()
    def answer(self) -> None:
        for settled in hear(self.core, self.outbound.popleft(), self.now):
            assert settled.handle not in self.settled
            assert set(settled.outcomes) == {Outcome.ACCEPTED}
            self.settled.add(settled.handle)
        self.pump()

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pump()

    def pump(self) -> None:
        for message, payload in self.core.take_messages(self.now):
            assert self.online
            assert isinstance(message, m.Push)
            assert message.spans(sum(map(len, payload))) == [8] * len(message.tokens)
            self.inbound.append(message)

    @invariant()
    def only_groups_go_beyond_the_credits(self) -> None:
        unanswered = [*self.inbound, *self.held]
        answered = {answer.first_seq for answer in self.outbound}
        plain = [p for p in unanswered if p.group_ids is None and p.first_seq not in answered]
        assert len(plain) <= self.credits

    def teardown(self) -> None:
        """Left alone with a dispatcher that has room, everything settles."""
        if not self.online:
            self.connect()
        for _ in range(1000):
            if not (self.inbound or self.held or self.outbound):
                if self.settled == self.submitted:
                    break
                self.wait(3.0)
            while self.inbound:
                self.receive(may_hold=True)
            while self.held:
                self.accept(0)
            while self.outbound:
                self.answer()
        assert self.settled == self.submitted


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=scaled(60), stateful_step_count=40, deadline=None)


# -- groups ------------------------------------------------------------------------------------


def test_what_the_dispatcher_let_go_of_is_sent_again_when_it_asks() -> None:
    core = connected(credits=1)
    core.submit([encoded()])
    (first,) = said(core)
    hear(core, m.Blocked(first_seq=0, cap="samples", held=9, capacity=9))
    assert said(core) == []
    hear(core, m.Resend(first_seq=0))
    assert said(core) == [first]
    with pytest.raises(ProtocolError, match="not outstanding"):
        hear(core, m.Resend(first_seq=7))


def test_a_withdrawn_member_closes_its_group_as_soon_as_the_dispatcher_can_hear_it() -> None:
    core = unconnected()
    ticket = core.submit([encoded(group_id="g", size=2)])
    assert core.abandon(ticket, 0.0)[0]
    connect(core, credits=1)
    assert said(core, 9.9) == []  # it may be tried again
    assert core.wait(9.0) == pytest.approx(1.0)
    told = m.CloseGroup(group_id="g", size=2, number=1, withdrawn=[0])
    assert said(core, 10.0) == [told, m.Ping()]
    assert core.wait(11.0) is None
    core.lost()
    connect(core, credits=1)
    assert said(core, 12.0) == [told, m.Ping()]  # until it is heard, in the same words


def test_a_member_that_is_withdrawn_and_pushed_again_keeps_its_group_open() -> None:
    core = unconnected()
    assert core.abandon(core.submit([encoded(group_id="g", size=2)]), 0.0)[0]
    core.submit([encoded(group_id="g", size=2)])
    connect(core, credits=1)
    assert [type(message) for message in said(core, 60.0)] == [m.Push]


def test_of_two_withdrawn_members_one_that_is_pushed_again_is_not_missed() -> None:
    core = unconnected()
    for ticket in [core.submit([encoded(tokens, group_id="g", size=2)]) for tokens in (1, 2)]:
        core.abandon(ticket, 0.0)
    core.submit([encoded(1, group_id="g", size=2)])  # the first once more, by what is in it
    connect(core, credits=1)
    (first,) = said(core, 10.0)
    assert isinstance(first, m.Push)
    hear(core, pushed(2, "accepted"), 10.0)
    told = m.CloseGroup(group_id="g", size=2, number=1, withdrawn=[1])
    assert said(core, 10.0) == [told, m.Ping()]


@pytest.mark.parametrize(("lost", "other"), [("lost", "other"), (None, None)])
def test_a_withdrawn_member_is_missed_though_others_come(
    lost: str | None, other: str | None
) -> None:
    core = unconnected()
    core.abandon(core.submit([encoded(1, lost, group_id="g", size=2)]), 0.0)
    core.submit([encoded(2, other, group_id="g", size=2)])
    connect(core, credits=1)
    assert pushes(core, 10.0) == [1]
    hear(core, pushed(1, "accepted"), 10.0)
    told = m.CloseGroup(group_id="g", size=2, number=1, withdrawn=[0])
    assert said(core, 10.0) == [told, m.Ping()]
