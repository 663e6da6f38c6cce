"""Admission: every push is answered once, in fairness, and nothing accepted is forgotten."""

import pytest

from dispatcher.core.admission import MAX_UNANSWERED, Admission, Push
from dispatcher.core.buffer import SampleBuffer
from dispatcher.core.events import Effect, Outcome, PushAnswered, PushHeld
from dispatcher.core.room import BufferLimits
from dispatcher.core.totals import Totals
from dispatcher.errors import ProtocolError
from dispatcher.sample import Sample
from tests.support.samples import make_sample

A, D, R, F = Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.REFUSED, Outcome.FULL


def make_admission(capacity: int = 4, credits_: int = 2) -> tuple[Admission, SampleBuffer]:
    buffer = SampleBuffer(BufferLimits(capacity, capacity, None, 10_000, 100))
    return Admission(buffer, Totals(), credits_, id_horizon=100), buffer


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


def test_a_push_with_room_is_accepted_at_once() -> None:
    admission, buffer = make_admission()
    effects = admission.push(plain("p", 0, 3), 0.0, may_hold=True)
    assert outcomes(effects) == [("p", 0, (A, A, A))]
    assert len(buffer) == 3


def test_the_same_push_again_is_answered_as_duplicate_and_stored_once() -> None:
    admission, buffer = make_admission()
    admission.push(plain("p", 0, 2), 0.0, may_hold=True)
    effects = admission.push(plain("p", 0, 2), 0.0, may_hold=True)
    assert outcomes(effects) == [("p", 0, (D, D))]
    assert len(buffer) == 2


def test_a_given_id_from_another_producer_is_a_duplicate() -> None:
    admission, _ = make_admission()
    admission.push(push("p", 0, make_sample("x"), named=True), 0.0, may_hold=True)
    effects = admission.push(push("q", 7, make_sample("x"), named=True), 0.0, may_hold=True)
    assert outcomes(effects) == [("q", 7, (D,))]


def test_a_given_id_twice_in_one_push_is_a_duplicate_the_second_time() -> None:
    admission, _ = make_admission()
    twice = push("p", 0, make_sample("x"), make_sample("y"), make_sample("x"), named=True)
    assert outcomes(admission.push(twice, 0.0, may_hold=True)) == [("p", 0, (A, A, D))]


def test_a_bad_sample_does_not_spoil_its_push() -> None:
    admission, _ = make_admission()
    mixed = push("p", 0, make_sample("a"), make_sample("b", tokens=0), make_sample("c"))
    (answer,) = admission.push(mixed, 0.0, may_hold=True)
    assert isinstance(answer, PushAnswered)
    assert answer.outcomes == (A, R, A)
    assert answer.errors == {1: "sample b has no tokens"}


def test_a_push_that_finds_no_room_is_held_and_answered_once_there_is() -> None:
    admission, buffer = make_admission(capacity=2)
    (held,) = admission.push(plain("p", 0, 3), 0.0, may_hold=True)
    assert isinstance(held, PushHeld)
    assert (held.full.cap, held.full.held, held.full.capacity) == ("samples", 2, 2)
    assert admission.retry(1.0) == []
    buffer.take(buffer.ready(1))
    assert outcomes(admission.retry(2.0)) == [("p", 0, (A, A, A))]
    assert admission.num_held == 0


def test_what_is_accepted_of_a_push_that_waits_for_the_rest_is_accepted_once() -> None:
    admission, buffer = make_admission(capacity=3)
    admission.push(plain("p", 0), 0.0, may_hold=True)
    admission.push(plain("", 0, 3), 0.0, may_hold=True)
    assert len(buffer) == 3
    buffer.take(buffer.ready(3))
    assert outcomes(admission.retry(1.0)) == [("", 0, (A, A, A))]
    assert len(buffer) == 1


def test_a_smaller_sample_finds_room_where_a_larger_one_before_it_does_not() -> None:
    buffer = SampleBuffer(BufferLimits(9, 9, 10, 10_000, 100))
    admission = Admission(buffer, Totals(), 2, id_horizon=100)
    samples = [make_sample(f"{at}", tokens) for at, tokens in enumerate([4, 7, 6])]
    admission.push(push("p", 0, samples[0]), 0.0, may_hold=False)
    answers = admission.push(push("p", 1, *samples[1:]), 0.0, may_hold=False)
    assert outcomes(answers) == [("p", 1, (F, A))]


def test_what_would_never_find_room_is_refused_though_others_wait() -> None:
    buffer = SampleBuffer(BufferLimits(9, 9, 10, 10_000, 100))
    admission = Admission(buffer, Totals(), 2, id_horizon=100)
    admission.push(push("p", 0, make_sample("a", 6)), 0.0, may_hold=True)
    assert isinstance(
        admission.push(push("p", 1, make_sample("b", 6)), 0.0, may_hold=True)[0], PushHeld
    )
    large = admission.push(push("q", 0, make_sample("c", 11)), 0.0, may_hold=True)
    assert outcomes(large) == [("q", 0, (R,))]


def test_held_pushes_go_in_order_of_arrival_and_later_ones_wait_behind_them() -> None:
    admission, buffer = make_admission(capacity=2)
    admission.push(plain("p", 0, 2), 0.0, may_hold=True)
    admission.push(plain("q", 0, 2), 0.0, may_hold=True)
    buffer.take(buffer.ready(1))
    (late,) = admission.push(plain("r", 0, 1), 0.0, may_hold=True)
    assert isinstance(late, PushHeld)  # there is room for it, but q was first
    assert outcomes(admission.retry(0.0)) == []
    buffer.take(buffer.ready(2))
    assert outcomes(admission.retry(0.0)) == [("q", 0, (A, A)), ("r", 0, (A,))]


def test_what_exceeds_a_producers_credits_is_answered_full() -> None:
    admission, _ = make_admission(capacity=1, credits_=2)
    admission.push(plain("p", 0), 0.0, may_hold=True)
    for seq in (1, 2):
        assert isinstance(admission.push(plain("p", seq), 0.0, may_hold=True)[0], PushHeld)
    assert outcomes(admission.push(plain("p", 3), 0.0, may_hold=True)) == [("p", 3, (F,))]
    assert isinstance(admission.push(plain("q", 0), 0.0, may_hold=True)[0], PushHeld)


def test_full_is_no_decision_the_sample_may_come_again() -> None:
    admission, buffer = make_admission(capacity=1)
    admission.push(plain("p", 0), 0.0, may_hold=False)
    assert outcomes(admission.push(plain("p", 1), 0.0, may_hold=False)) == [("p", 1, (F,))]
    buffer.take(buffer.ready(1))
    assert outcomes(admission.push(plain("p", 1), 0.0, may_hold=False)) == [("p", 1, (A,))]


def test_a_member_of_an_open_group_passes_those_who_wait() -> None:
    admission, _ = make_admission(capacity=2)
    first = make_sample("g0", group_id="g", group_size=2)
    second = make_sample("g1", group_id="g", group_size=2)
    admission.push(push("p", 0, first), 0.0, may_hold=True)
    assert isinstance(admission.push(plain("q", 0), 0.0, may_hold=True)[0], PushHeld)
    assert outcomes(admission.push(push("r", 0, second), 0.0, may_hold=True)) == [("r", 0, (A,))]


def test_a_producer_that_is_gone_has_nothing_waiting() -> None:
    admission, buffer = make_admission(capacity=1)
    admission.push(plain("p", 0), 0.0, may_hold=True)
    admission.push(plain("q", 0), 0.0, may_hold=True)
    admission.producer_gone("q")
    buffer.take(buffer.ready(1))
    assert admission.retry(0.0) == []
    assert outcomes(admission.push(plain("q", 0), 0.0, may_hold=True)) == [("q", 0, (A,))]


def test_closing_answers_what_waits_and_refuses_what_comes() -> None:
    admission, _ = make_admission(capacity=1)
    admission.push(plain("p", 0, 2), 0.0, may_hold=True)
    assert outcomes(admission.close("the stream has ended")) == [("p", 0, (A, R))]
    (answer,) = admission.push(plain("q", 0), 0.0, may_hold=True)
    assert isinstance(answer, PushAnswered)
    assert answer.errors == {0: "the stream has ended"}


def test_a_sample_of_an_ended_phase_comes_too_late() -> None:
    admission, _ = make_admission()
    admission.oldest_version = 3
    late, new = make_sample("a", policy_version=2), make_sample("b", policy_version=3)
    assert outcomes(admission.push(push("p", 0, late, new), 0.0, may_hold=True)) == [
        ("p", 0, (R, A))
    ]


def test_a_floor_that_would_have_too_much_remembered_is_refused_and_changes_nothing() -> None:
    admission, buffer = make_admission()
    with pytest.raises(ProtocolError, match="raise the floor"):
        admission.push(plain("p", MAX_UNANSWERED), 0.0, may_hold=True)
    assert len(buffer) == 0
    near = push("p", MAX_UNANSWERED, make_sample("s"), floor=1)
    assert outcomes(admission.push(near, 0.0, may_hold=True)) == [("p", MAX_UNANSWERED, (A,))]
