"""Groups: open for as long as they may become whole, and given up as soon as they cannot."""

import pytest

from rollout_dispatcher.core.effects import (
    Advised,
    GroupEvicted,
)
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.sample import SIZE_AT_CLOSE, Outcome, Sample
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

A, R = Outcome.ACCEPTED, Outcome.REFUSED
INCOMPLETE, NO_ROOM = DropReason.INCOMPLETE_GROUP, DropReason.NO_ROOM
SAMPLE = 32  # bytes


def member(name: str, size: int = 4, tokens: int = 4) -> Sample:
    """`g1` is a member of group `g`."""
    return make_sample(name, tokens, group_id=name[0], group_size=size)


def members(names: str, size: int = 4) -> list[Sample]:
    """`g:0,1` are two members of group `g`."""
    group, _, numbers = names.partition(":")
    return [member(f"{group}{number}", size) for number in numbers.split(",")]


def test_a_size_that_comes_late_counts_who_has_come() -> None:
    bench = Bench(batch=4, window=4, capacity=4)
    bench.join()
    assert bench.push(*members("g:0,1,2,3", SIZE_AT_CLOSE)) == (A, A, A, A)
    assert bench.push(member("g4", 4)) == (R,)
    assert "says that group g has 4 samples, and 4 of them have come" in bench.errors()[-1]
    assert bench.push(member("g5", 3)) == (R,)
    bench.perform(bench.core.close_group("g", bench.now))
    bench.hungry()
    assert bench.trained(0) == {"g0", "g1", "g2", "g3"}


@pytest.mark.parametrize(("keep", "committed"), [(False, 0), (True, 3)])
def test_a_refused_member_is_lacking_from_then_on(keep: bool, committed: int) -> None:
    bench = Bench(keep_incomplete=keep)
    bench.join()
    assert bench.push(*members("g:0,1")) == (A, A)
    assert bench.push(member("g2", tokens=2000)) == (R,)
    assert bench.dropped(INCOMPLETE) == (0 if keep else 2)
    assert bench.push(member("g3")) == ((A,) if keep else (R,))
    if not keep:
        assert "group g was given up: a member was refused" in bench.errors()[-1]
    bench.perform(bench.core.end_stream(bench.now, "p"))
    assert bench.core._ledger.steps.in_flight == committed
    assert bench.core.statistics().balanced


def test_a_group_that_is_closed_with_keep_is_trained_on_as_it_is() -> None:
    bench = Bench(durable=True)
    bench.push(*members("g:0,1"))
    bench.facts.clear()
    bench.perform(bench.core.close_group("g", bench.now, keep=True))
    at = bench.core.statistics()
    assert (at.ready, at.open_groups) == (2, 0)
    assert "GroupSized(tickets=(0, 1), size=2)" in str(bench.facts)


# -- repeated, late, of no group -------------------------------------------------------------


def test_a_group_that_turns_out_larger_than_a_step_is_given_up() -> None:
    bench = Bench(batch=4)
    bench.push(*members("g:0,1", SIZE_AT_CLOSE))
    bench.perform(bench.core.close_group("g", bench.now, size=9))
    assert bench.dropped(INCOMPLETE) == 2
    assert bench.push(member("g2", SIZE_AT_CLOSE)) == (R,)
    assert "it has 9 samples, and a step takes at most 4" in bench.errors()[-1]


def test_a_withdrawn_member_is_lacking_and_others_are_notified() -> None:
    bench = Bench()
    bench.push(*members("g:0,1"))
    for _ in range(2):  # repeated after a reconnect
        bench.perform(bench.core.withdraw("g", 4, "p", [99], bench.now))
    assert bench.dropped(INCOMPLETE) == 2
    assert bench.push(member("g3")) == (R,)
    assert "a member was withdrawn by its producer" in bench.errors()[-1]
    assert bench.push(member("g9")) == (R,)


def test_who_closes_a_group_of_which_nothing_is_known_is_advised() -> None:
    bench = Bench()
    for _ in range(2):  # repeated after a reconnect
        bench.perform(bench.core.close_group("gee", bench.now, request=("p", 0)))
    bench.push(*members("g:0,1"))
    bench.perform(bench.core.close_group("g", bench.now, request=("p", 1)))
    bench.perform(bench.core.close_group("g", bench.now, request=("p", 2)))
    [advised] = [effect for effect in bench.log if isinstance(effect, Advised)]
    assert advised.producer == "p"
    assert advised.text.startswith("group gee is not known, so closing it changes nothing")


@pytest.mark.parametrize("size", [4, SIZE_AT_CLOSE])
def test_what_is_known_of_a_groups_size_outlives_the_dispatcher(size: int) -> None:
    bench = Bench(durable=True, keep_incomplete=True, capacity=20)
    bench.push(*members("g:0,1", size))
    bench.push(member("g2", size, tokens=2000))  # lacking from now on
    bench.push(*members("h:0,1,2", SIZE_AT_CLOSE))
    bench.perform(bench.core.close_group("h", bench.now, size=2))  # one more than before
    bench.restart()
    assert bench.core.statistics().ready == 3
    assert bench.push(member("g3", size)) == (A,)
    if size == SIZE_AT_CLOSE:
        bench.perform(bench.core.close_group("g", bench.now))
    assert (bench.core.statistics().ready, bench.core.statistics().open_groups) == (6, 0)


# -- at the hard cap -----------------------------------------------------------------------------


def test_without_a_journal_the_youngest_beginning_makes_room_and_its_producers_are_notified() -> (
    None
):
    bench = Bench(batch=4, nbytes=4 * SAMPLE)
    bench.join()
    for name in ("a0", "b0", "c0", "d0"):
        bench.push(member(name))
    assert bench.push(member("a1")) is None
    assert bench.push(member("d1")) is None
    bench.pass_time(60)
    assert bench.dropped(NO_ROOM) == 0  # nobody is hungry
    bench.hungry()
    bench.pass_time(2.1)
    assert bench.dropped(NO_ROOM) == 1
    (given_up,) = [effect for effect in bench.log if isinstance(effect, GroupEvicted)]
    assert (given_up.group_id, given_up.num_samples, given_up.cap.cap) == ("d", 1, "bytes")
    assert bench.core.statistics().pushes_held == 0  # `a1` came in and `d1` was refused
    assert "group d was given up: there was no room" in bench.errors()[-1]
    assert bench.core.statistics().balanced


def test_held_pushes_are_explained() -> None:
    bench = Bench(batch=4, nbytes=4 * SAMPLE)
    bench.join()
    for name in ("a0", "b0", "c0", "d0"):
        bench.push(member(name))
    bench.push(member("a1"))
    bench.pass_time(5)
    assert bench.core.waits_for(bench.now) == (
        "0 of 4 samples are ready; 4 open groups hold 4 samples; the oldest is group a (1 of 4), "
        "of producer p, and has not grown for 5 s; 1 push waits at the bytes cap (128 of 128)"
    )
