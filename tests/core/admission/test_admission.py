"""Admission: every push is answered once, in fairness, and nothing accepted is forgotten."""

from typing import Any

import pytest

from rollout_dispatcher.core.admission.admission import MAX_UNANSWERED, Admission
from rollout_dispatcher.core.admission.blocked_pushes import MAX_OF_GROUP, Push
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.effects import Effect, PushAnswered, PushBlocked, ResendRequested
from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Reference, StoredObject, WithProducer
from rollout_dispatcher.sample import Outcome, Sample
from tests.support.core.admissions import Lobby
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

A, D, R, F = Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.REFUSED, Outcome.FULL


def make_admission(
    capacity: int = 4, credits_: int = 2, batch: int = 1
) -> tuple[Admission, SampleBuffer]:
    lobby = Lobby(BufferLimits(capacity, capacity, None, 10_000, 100), batch, credits_)
    return lobby.admission, lobby.buffer


def member(name: str, group_id: str = "g", size: int = 2, tokens: int = 4) -> Sample:
    return make_sample(name, tokens, group_id=group_id, group_size=size)


def push(producer: str, first_seq: int, *samples: Sample, **options: object) -> Push:
    return Push(producer, first_seq, samples, **options)  # type: ignore[arg-type]


def plain(producer: str, first_seq: int, count: int = 1) -> Push:
    samples = [make_sample(f"{producer}/{first_seq + at}") for at in range(count)]
    return push(producer, first_seq, *samples)


def outcomes(effects: list[Effect]) -> list[tuple[str, int, tuple[Outcome, ...]]]:
    assert all(isinstance(effect, PushAnswered) for effect in effects)
    return [
        (effect.producer, effect.first_seq, effect.outcomes)
        for effect in effects
        if isinstance(effect, PushAnswered)
    ]


def test_a_given_id_twice_in_one_push_is_a_duplicate_the_second_time() -> None:
    admission, _ = make_admission()
    twice = push("p", 0, make_sample("x"), make_sample("y"), make_sample("x"), named=True)
    assert outcomes(admission.push(twice, 0.0, may_wait=True)) == [("p", 0, (A, A, D))]


def test_a_bad_sample_does_not_spoil_its_push() -> None:
    admission, _ = make_admission()
    mixed = push("p", 0, make_sample("a"), make_sample("b", tokens=0), make_sample("c"))
    (answer,) = admission.push(mixed, 0.0, may_wait=True)
    assert isinstance(answer, PushAnswered)
    assert answer.outcomes == (A, R, A)
    assert answer.errors == {1: "sample b has no tokens"}


def test_a_smaller_sample_finds_room_where_a_larger_one_before_it_does_not() -> None:
    lobby = Lobby(BufferLimits(9, 9, None, 80, 100), batch=9)
    admission = lobby.admission
    samples = [make_sample(f"{at}", tokens) for at, tokens in enumerate([4, 7, 6])]
    admission.push(push("p", 0, samples[0]), 0.0, may_wait=False)
    answers = admission.push(push("p", 1, *samples[1:]), 0.0, may_wait=False)
    assert outcomes(answers) == [("p", 1, (F, A))]
    assert admission.capacity.at_hard_cap


def test_what_would_never_find_room_is_refused_though_others_wait() -> None:
    admission, _ = make_admission(capacity=1)
    admission.push(plain("p", 0), 0.0, may_wait=True)
    assert isinstance(admission.push(plain("p", 1), 0.0, may_wait=True)[0], PushBlocked)
    large = admission.push(push("q", 0, make_sample("c", 101)), 0.0, may_wait=True)
    assert outcomes(large) == [("q", 0, (R,))]


def test_beginnings_of_groups_hold_nobody_back() -> None:
    admission, buffer = make_admission(capacity=2, batch=2)
    for at in range(20):
        effects = admission.push(push("p", at, member(f"{at}.0", f"g{at}")), 0.0, may_wait=True)
        assert outcomes(effects) == [("p", at, (A,))]
    admission.push(plain("q", 0, 2), 0.0, may_wait=True)
    late = admission.push(push("p", 20, member("20.0", "g20")), 0.0, may_wait=True)
    assert isinstance(
        late[0], PushBlocked
    )  # a step could be planned: this group waits for its turn
    for at in range(20):
        effects = admission.push(push("r", at, member(f"{at}.1", f"g{at}")), 0.0, may_wait=True)
        assert outcomes(effects) == [("r", at, (A,))]
    assert buffer.ready_units == 42


def test_members_of_a_group_that_begins_while_they_wait_come_in_with_it() -> None:
    lobby = Lobby(BufferLimits(1, 9, None, 10_000, 100), credits_=9)
    admission, buffer = lobby.admission, lobby.buffer
    admission.push(plain("p", 0), 0.0, may_wait=True)
    for at, sample in enumerate([member("g0"), make_sample("a"), member("g1")], 1):
        held = admission.push(push("p", at, sample), 0.0, may_wait=True)
        assert isinstance(held[0], PushBlocked)
    buffer.remove(buffer.ready(1))
    # `g0` begins its group; then `a` fills the buffer; `g1` belongs to what is open by now.
    assert sorted(outcomes(admission.retry(1.0))) == [(("p"), at, (A,)) for at in (1, 2, 3)]
    assert len(admission.blocked) == 0


class Counted(Admission):
    """Knows how often it was asked."""

    times = 0

    def _decide_each(self, push: Push, now: float, *, in_line: bool) -> None:
        self.times += 1
        super()._decide_each(push, now, in_line=in_line)


def test_a_group_of_which_nobody_waited_has_nobody_looked_at_again() -> None:
    lobby = Lobby(BufferLimits(4, 4, None, 100, 100), 4, 2, kind=Counted)
    admission = lobby.admission
    admission.push(push("p", 0, member("a"), member("b", tokens=10)), 0.0, may_wait=True)
    assert len(admission.blocked) == 1  # with the group that it began itself
    assert isinstance(admission, Counted)
    asked = admission.times
    empty = push("", 0, make_sample("c", 0))
    assert outcomes(admission.push(empty, 0.0, may_wait=False)) == [("", 0, (Outcome.REFUSED,))]
    assert admission.times == asked + 1  # for the push itself


def test_over_http_a_hard_cap_is_forgotten_when_nobody_asks_any_more() -> None:
    lobby = Lobby(BufferLimits(9, 9, None, 32, 100), batch=2)
    lobby.admission.push(push("", 0, make_sample("a")), 0.0, may_wait=False)
    lobby.admission.push(push("", 0, make_sample("b")), 1.0, may_wait=False)
    assert lobby.admission.capacity.is_stuck(2.0, waits=len(lobby.admission.blocked) > 0)
    assert not lobby.admission.capacity.is_stuck(9.0, waits=len(lobby.admission.blocked) > 0)


def test_a_refused_member_is_lost_to_its_group_but_not_what_claims_to_be_another() -> None:
    lobby = Lobby(BufferLimits(9, 4, None, 10_000, 100))
    pushed = (
        member("g0", size=3),
        member("long", size=3, tokens=101),
        member("other", size=2),
        member("huge", "h", size=5),
    )
    answers = lobby.admission.push(push("p", 0, *pushed), 0.0, may_wait=True)
    assert outcomes(answers) == [("p", 0, (A, R, R, R))]
    assert ("g" in lobby.closed_groups, "h" in lobby.closed_groups) == (True, False)


def test_a_member_of_a_group_that_was_given_up_is_told_why() -> None:
    lobby = Lobby(BufferLimits(9, 9, None, 10_000, 100))
    lobby.closed_groups.lack("g", "there was no room", 2)
    for at in range(2):
        (answer,) = lobby.admission.push(push("p", at, member(f"g{at}")), 1.0, may_wait=True)
        assert isinstance(answer, PushAnswered)
        assert answer.errors[0].startswith("group g was given up: there was no room; a group_id")
    answers = lobby.admission.push(push("p", 2, member("anew")), 1.0, may_wait=True)
    assert outcomes(answers) == [("p", 2, (A,))]  # all that was missing has been refused


def test_what_the_journal_has_no_room_for_waits_whatever_is_free_in_memory() -> None:
    lobby = Lobby(BufferLimits(9, 9, None, 10_000, 100), batch=9, note=lambda _: None)
    admission, room = lobby.admission, [70]
    admission.capacity.journal_takes = lambda _, nbytes: nbytes <= room[0]
    held = admission.push(plain("p", 0, 3), 0.0, may_wait=True)  # of 32 bytes each
    assert isinstance(held[0], PushBlocked)
    assert (held[0].full.cap, lobby.buffer.ready_units) == ("journal", 2)
    assert admission.capacity.is_stuck(0.0, waits=len(admission.blocked) > 0)
    room[0] = 40
    assert admission.retry(0.0) == []  # what was let in is not with the journal yet
    admission.capacity.journaled()
    assert outcomes(admission.retry(0.0)) == [("p", 0, (A, A, A))]


# -- references -------------------------------------------------------------------------------


def referred(name: str, store: str, **options: Any) -> Sample:
    stored = StoredObject(store, f"key of {name}", 32)
    return make_sample(name, **options)._replace(payload=Reference(stored, 0, 32))


def test_a_reference_into_a_store_that_is_not_known_is_refused_with_what_to_do() -> None:
    lobby = Lobby(BufferLimits(4, 4, None, 10_000, 100, stores=frozenset()))
    admission, buffer = lobby.admission, lobby.buffer
    mixed = push("p", 0, make_sample("a"), referred("b", "ray"), make_sample("c"))
    (answer,) = admission.push(mixed, 0.0, may_wait=True)
    assert isinstance(answer, PushAnswered)
    assert answer.outcomes == (A, R, A)
    assert answer.errors == {
        1: "sample b comes as a reference into the store 'ray', which is not allowed here "
        "(allowed: none); add it to --payload-stores, or push its tensors themselves"
    }
    assert len(buffer) == 2
    assert outcomes(admission.push(mixed, 0.0, may_wait=True)) == [("p", 0, (A, R, A))]


def test_a_group_hears_of_a_member_that_was_refused_as_a_reference() -> None:
    lobby = Lobby(BufferLimits(4, 4, None, 10_000, 100))
    pushed = push("p", 0, member("g0"), referred("g1", "ray", group_id="g", group_size=2))
    assert outcomes(lobby.admission.push(pushed, 0.0, may_wait=True)) == [("p", 0, (A, R))]
    assert "g" in lobby.closed_groups


def test_a_reference_into_a_known_store_is_accepted_and_takes_no_memory() -> None:
    limits = BufferLimits(9, 9, None, 40, 100, stores=frozenset({"files", "ray"}))
    lobby = Lobby(limits, batch=9)
    pushed = push("p", 0, *(referred(f"s{at}", "ray") for at in range(4)), make_sample("here"))
    assert outcomes(lobby.admission.push(pushed, 0.0, may_wait=True)) == [("p", 0, (A,) * 5)]
    assert (len(lobby.buffer), lobby.buffer.held.nbytes) == (5, 32)
    lobby.buffer.remove(lobby.buffer.ready(9))
    assert lobby.buffer.held.nbytes == 0
    (answer,) = lobby.admission.push(push("p", 5, referred("t", "nfs")), 0.0, may_wait=True)
    assert isinstance(answer, PushAnswered)
    assert "'nfs', which is not allowed here (allowed: files, ray)" in answer.errors[0]


# -- what held pushes take of memory -----------------------------------------------------------


def crowded(held_bytes: int = 40) -> Lobby:
    """A batch is ready, and two pushes of one sample (32 bytes) wait."""
    lobby = Lobby(BufferLimits(2, 2, None, 10_000, 100, held_bytes), batch=2, credits_=9)
    lobby.admission.push(plain("p", 0, 2), 0.0, may_wait=True)
    for seq in (2, 3, 4):
        assert isinstance(lobby.admission.push(plain("p", seq), 0.0, may_wait=True)[0], PushBlocked)
    return lobby


def test_payloads_of_held_pushes_are_bounded_and_asked_for_when_their_turn_comes() -> None:
    lobby = crowded()
    admission, buffer = lobby.admission, lobby.buffer
    assert admission.blocked.nbytes == 32  # of three
    held = [push.samples[0].payload for push in admission.blocked]
    assert held[1:] == [WithProducer(32)] * 2
    buffer.remove(buffer.ready(2))
    first, second = admission.retry(0.0)
    assert outcomes([first]) == [("p", 2, (A,))]
    assert second == ResendRequested("p", 3)  # one is ready, one more may come
    assert admission.retry(0.0) == []  # it is on its way
    assert outcomes(admission.push(plain("p", 3), 0.0, may_wait=True)) == [("p", 3, (A,))]
    assert (
        len(admission.blocked),
        admission.blocked.nbytes,
        admission.blocked.resending_samples,
    ) == (1, 0, 0)


def test_a_payload_that_comes_again_may_not_be_another() -> None:
    lobby = crowded()
    with pytest.raises(ProtocolError, match="other samples"):
        lobby.admission.push(push("p", 3, make_sample("else")), 0.0, may_wait=True)


def test_a_producer_that_is_gone_leaves_no_payload_behind() -> None:
    lobby = crowded(held_bytes=1000)
    assert lobby.admission.blocked.nbytes == 96
    lobby.admission.producer_gone("p")
    assert (len(lobby.admission.blocked), lobby.admission.blocked.nbytes) == (0, 0)


def test_held_pushes_go_in_order_of_arrival_and_later_ones_wait_behind_them() -> None:
    admission, buffer = make_admission(capacity=2)
    admission.push(plain("p", 0, 2), 0.0, may_wait=True)
    admission.push(plain("q", 0, 2), 0.0, may_wait=True)
    buffer.remove(buffer.ready(1))
    (late,) = admission.push(plain("r", 0, 1), 0.0, may_wait=True)
    assert isinstance(late, PushBlocked)  # there is room for it, but q was first
    assert outcomes(admission.retry(0.0)) == []
    buffer.remove(buffer.ready(2))
    assert outcomes(admission.retry(0.0)) == [("q", 0, (A, A)), ("r", 0, (A,))]


def test_what_exceeds_a_producers_credits_is_answered_full() -> None:
    admission, _ = make_admission(capacity=1, credits_=2)
    admission.push(plain("p", 0), 0.0, may_wait=True)
    for seq in (1, 2):
        assert isinstance(admission.push(plain("p", seq), 0.0, may_wait=True)[0], PushBlocked)
    assert outcomes(admission.push(plain("p", 3), 0.0, may_wait=True)) == [("p", 3, (F,))]
    assert isinstance(admission.push(plain("q", 0), 0.0, may_wait=True)[0], PushBlocked)


def test_more_members_of_one_group_than_may_wait_are_answered_full_until_some_have_left() -> None:
    admission, _ = make_admission(capacity=2)
    admission.push(plain("p", 0, 2), 0.0, may_wait=True)
    crowd = [push(f"q{at}", 0, member(f"q{at}")) for at in range(MAX_OF_GROUP)]
    for one in crowd:
        assert isinstance(admission.push(one, 0.0, may_wait=True)[0], PushBlocked)
    late = push("late", 0, member("late"), member("other", "h"))
    assert outcomes(admission.push(late, 0.0, may_wait=True)) == [("late", 0, (F, F))]
    assert isinstance(
        admission.push(push("r", 0, member("r", "h")), 0.0, may_wait=True)[0], PushBlocked
    )
    admission.producer_gone("q0")
    again = push("late", 0, member("late"), member("other", "h"))
    assert isinstance(admission.push(again, 0.0, may_wait=True)[0], PushBlocked)


def test_a_producer_that_is_gone_has_nothing_waiting() -> None:
    admission, buffer = make_admission(capacity=1)
    admission.push(plain("p", 0), 0.0, may_wait=True)
    admission.push(plain("q", 0), 0.0, may_wait=True)
    admission.producer_gone("q")
    buffer.remove(buffer.ready(1))
    assert admission.retry(0.0) == []
    assert outcomes(admission.push(plain("q", 0), 0.0, may_wait=True)) == [("q", 0, (A,))]


def test_a_producer_that_reconnects_stands_where_it_would_have_stood() -> None:
    admission, _ = make_admission()
    for pushed in (plain("a", 0, 4), plain("b", 0, 4), plain("b", 4, 4)):
        admission.push(pushed, 0.0, may_wait=True)
    for _ in range(5):
        admission.push(plain("c", 0, 4), 0.0, may_wait=True)
        admission.producer_gone("c")
    admission.push(plain("c", 0, 4), 0.0, may_wait=True)
    assert [held.producer for held in admission.blocked] == ["b", "c", "b"]


def test_a_floor_that_would_have_too_much_remembered_is_refused_and_changes_nothing() -> None:
    admission, buffer = make_admission()
    with pytest.raises(ProtocolError, match="raise the floor"):
        admission.push(plain("p", MAX_UNANSWERED), 0.0, may_wait=True)
    assert len(buffer) == 0
    near = push("p", MAX_UNANSWERED, make_sample("s"), floor=1)
    assert outcomes(admission.push(near, 0.0, may_wait=True)) == [("p", MAX_UNANSWERED, (A,))]


@pytest.mark.parametrize("leaves", ["lost", "withdrawn"])
def test_who_stands_behind_a_push_that_leaves_the_line_comes_in_at_once(leaves: str) -> None:
    bench = Bench(batch=2, window=6, nbytes=20 * 8)
    bench.push_plain(2, tokens=8)
    assert bench.push(member("large", tokens=16), by="q") is None
    assert bench.push(make_sample("small", 4), by="r") is None
    if leaves == "lost":
        bench.perform(bench.core.producer_disconnected("q", bench.now))
    else:
        bench.perform(bench.core.withdraw("g", 2, "q", [2], bench.now))
    assert bench.core.statistics().pushes_held == 0
    assert outcomes([bench.log[-1]]) == [("r", 3, (A,))]
