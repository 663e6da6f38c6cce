"""Admission: every push is answered once, in fairness, and nothing accepted is forgotten."""

from typing import Any

import pytest

from rollout_dispatcher.core.admission.admission import MAX_UNANSWERED, Admission
from rollout_dispatcher.core.admission.blocked_pushes import MAX_OF_GROUP, Push
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.entry import BufferLimits
from rollout_dispatcher.core.effects import Effect, PushAnswered, PushBlocked
from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.sample import Outcome, Sample
from tests.support.core.admissions import Lobby
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


def test_a_bad_sample_does_not_spoil_its_push() -> None:
    admission, _ = make_admission()
    mixed = push("p", 0, make_sample("a"), make_sample("b", tokens=0), make_sample("c"))
    (answer,) = admission.push(mixed, 0.0, may_wait=True)
    assert isinstance(answer, PushAnswered)
    assert answer.outcomes == (A, R, A)
    assert answer.errors == {1: "sample b has no tokens"}


def test_a_member_of_a_group_that_was_given_up_is_refused_with_the_reason() -> None:
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


def test_a_push_that_comes_in_at_once_counts_as_what_the_journal_is_still_to_get() -> None:
    lobby = Lobby(BufferLimits(9, 9, None, 10_000, 100), batch=9, note=lambda _: None)
    admission = lobby.admission
    admission.capacity.journal_takes = lambda _, nbytes: nbytes <= 100
    whole = admission.push(plain("p", 0, 3), 0.0, may_wait=True)  # of 32 bytes each
    assert outcomes(whole) == [("p", 0, (A, A, A))]
    assert isinstance(admission.push(plain("p", 3), 0.0, may_wait=True)[0], PushBlocked)
    admission.capacity.journaled()
    assert outcomes(admission.retry(0.0)) == [("p", 3, (A,))]


def test_who_would_fit_waits_behind_who_does_not_while_a_step_could_be_planned() -> None:
    admission = Lobby(BufferLimits(9, 9, None, 100, 100)).admission
    assert outcomes(admission.push(plain("p", 0), 0.0, may_wait=True)) == [("p", 0, (A,))]
    large = push("p", 1, make_sample("large", 10))
    for one in (large, plain("p", 2)):
        assert isinstance(admission.push(one, 0.0, may_wait=True)[0], PushBlocked)


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


def test_a_payload_that_comes_again_may_not_be_another() -> None:
    lobby = crowded()
    with pytest.raises(ProtocolError, match="other samples"):
        lobby.admission.push(push("p", 3, make_sample("else")), 0.0, may_wait=True)


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


def test_a_floor_that_would_have_too_much_remembered_is_refused_and_changes_nothing() -> None:
    admission, buffer = make_admission()
    with pytest.raises(ProtocolError, match="raise the floor"):
        admission.push(plain("p", MAX_UNANSWERED), 0.0, may_wait=True)
    assert len(buffer) == 0
    near = push("p", MAX_UNANSWERED, make_sample("s"), floor=1)
    assert outcomes(admission.push(near, 0.0, may_wait=True)) == [("p", MAX_UNANSWERED, (A,))]


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
