"""Groups: open for as long as they may become whole, and given up as soon as they cannot."""

import pytest

from dispatcher.core.events import DropReason, GroupGivenUp, Outcome, PayloadsToJournal, Trigger
from dispatcher.sample import SIZE_AT_CLOSE, Sample
from tests.support.cores import Bench
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


def test_interleaved_groups_larger_together_than_the_buffer_become_whole() -> None:
    bench = Bench(batch=4, window=4, capacity=4)
    bench.join()
    for number in range(4):
        for group in "abcdefgh":
            assert bench.push(member(f"{group}{number}")) is not None
            bench.hungry()
    for step in range(8):
        bench.train(step)
    at = bench.core.statistics()
    assert (at.samples_committed, at.small_steps, at.buffered) == (32, 0, 0)


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
    assert bench.core.ledger.steps.in_flight == committed
    assert bench.core.statistics().balanced


def test_the_first_member_may_be_the_one_that_is_refused() -> None:
    for keep, expected in ((False, (R, R, R)), (True, (A, A, A))):
        bench = Bench(keep_incomplete=keep)
        assert bench.push(member("g0", tokens=2000)) == (R,)
        assert bench.push(*members("g:1,2,3")) == expected
        assert bench.core.statistics().open_groups == 0
        assert bench.push(member("g9", size=2)) == (A,)  # the id may be used again


def test_a_group_that_is_closed_with_keep_is_trained_on_as_it_is() -> None:
    bench = Bench(durable=True)
    bench.push(*members("g:0,1"))
    bench.core.take_facts()
    bench.perform(bench.core.close_group("g", bench.now, keep=True))
    at = bench.core.statistics()
    assert (at.ready, at.open_groups) == (2, 0)
    assert "GroupSized(tickets=(0, 1), size=2)" in str(bench.core.take_facts())


def test_the_size_of_a_group_may_be_told_when_it_is_closed() -> None:
    bench = Bench()
    bench.push(*members("g:0,1", SIZE_AT_CLOSE))
    bench.perform(bench.core.close_group("g", bench.now, size=3))
    assert bench.core.statistics().ready == 0
    assert bench.push(member("g2", SIZE_AT_CLOSE)) == (A,)
    assert bench.core.statistics().ready == 3
    bench.push(*members("h:0,1", SIZE_AT_CLOSE))
    bench.perform(bench.core.close_group("h", bench.now))  # these were all
    assert bench.core.statistics().ready == 5
    assert bench.dropped(INCOMPLETE) == 0


def test_one_contributor_that_is_there_keeps_a_group_open() -> None:
    bench = Bench(group_timeout=5.0, producer_timeout=10.0)
    bench.push(member("g0"), by="p")
    bench.push(member("g1"), by="q")
    bench.perform(bench.core.producer_lost("p", bench.now))
    bench.pass_time(100)
    assert bench.dropped(INCOMPLETE) == 0
    bench.perform(bench.core.producer_lost("q", bench.now))
    bench.pass_time(9.9)
    bench.core.producer_connected("q")  # it was away, and is back in time
    bench.pass_time(100)
    assert bench.dropped(INCOMPLETE) == 0
    bench.perform(bench.core.producer_lost("q", bench.now))
    bench.pass_time(10.1)
    assert bench.dropped(INCOMPLETE) == 2


# -- at the hard cap -----------------------------------------------------------------------------


def test_without_a_journal_the_youngest_beginning_makes_room_and_its_producers_are_told() -> None:
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
    (given_up,) = [effect for effect in bench.log if isinstance(effect, GroupGivenUp)]
    assert (given_up.group_id, given_up.num_samples, given_up.cap.cap) == ("d", 1, "bytes")
    assert bench.core.statistics().pushes_held == 0  # `a1` came in and `d1` was refused
    assert "group d was given up: there was no room" in bench.errors()[-1]
    assert bench.core.statistics().balanced


def test_what_is_ready_goes_in_a_smaller_step_though_groups_grow() -> None:
    bench = Bench(batch=4, nbytes=4 * SAMPLE)
    bench.join()
    bench.push_plain(2)
    bench.push(*members("g:0,1"))
    assert bench.push(member("g2")) is None
    bench.hungry()
    bench.pass_time(2.1)
    assert bench.triggers == [Trigger.BUFFER_FULL]
    assert bench.core.statistics().pushes_held == 0
    assert bench.dropped(NO_ROOM) == 0


def test_with_a_journal_beginnings_leave_memory_and_come_back_for_their_step() -> None:
    bench = Bench(batch=4, nbytes=4 * SAMPLE, durable=True)
    bench.join()
    bench.hungry()
    for number in range(4):
        for group in "abcdefgh":
            held = bench.push(member(f"{group}{number}")) is None
            assert not held or bench.core.buffer.ready_units >= 4, "a step can be planned"
            assert bench.core.buffer.held_bytes <= 4 * SAMPLE
    for step in range(8):
        bench.hungry()
        bench.train(step)
    at = bench.core.statistics()
    assert (at.samples_committed, at.small_steps, at.buffered) == (32, 0, 0)
    assert bench.dropped(NO_ROOM) == 0


def test_a_journal_that_does_not_take_payloads_gives_no_group_up_for_want_of_memory() -> None:
    bench = Bench(batch=4, nbytes=4 * SAMPLE, durable=True)
    bench.syncs = False
    bench.join()
    bench.hungry()
    for name in ("a0", "b0", "c0", "d0"):
        bench.push(member(name))
    assert bench.push(member("a1")) is None
    bench.pass_time(600)
    assert bench.dropped(NO_ROOM) == 0
    (asked,) = [effect for effect in bench.log if isinstance(effect, PayloadsToJournal)]
    bench.perform(bench.core.payloads_durable(asked.entries, bench.now))
    assert bench.core.statistics().pushes_held == 0


def test_a_full_journal_is_relieved_of_one_beginning_after_the_other() -> None:
    bench = Bench(batch=4, durable=True)
    room = [True]
    bench.core.heed_journal(lambda *_: room[0])
    bench.join()
    bench.hungry()
    for name in ("a0", "b0", "c0"):
        bench.push(member(name))
    room[0] = False
    assert bench.push(member("a1")) is None
    bench.pass_time(2.1)
    assert bench.dropped(NO_ROOM) == 1
    bench.pass_time(0.3)
    assert bench.dropped(NO_ROOM) == 2
    room[0] = True
    bench.perform(bench.core.journal_has_room(bench.now))
    assert bench.core.statistics().pushes_held == 0


def test_held_pushes_are_explained() -> None:
    bench = Bench(batch=4, nbytes=4 * SAMPLE)
    bench.join()
    for name in ("a0", "b0", "c0", "d0"):
        bench.push(member(name))
    bench.push(member("a1"))
    bench.pass_time(5)
    assert bench.core.waits_for(bench.now) == (
        "0 of 4 samples are ready; 4 open groups hold 4 samples; the oldest is group a (1 of 4), "
        "of producer p, and has not grown for 5 s; 1 pushes wait at the bytes cap (128 of 128)"
    )
