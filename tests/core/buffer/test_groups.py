"""Groups: open for as long as they may become whole, and given up as soon as they cannot."""

import pytest

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import (
    Advised,
    GroupEvicted,
    PayloadsToJournal,
    ResendRequested,
)
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.planning.trigger import Trigger
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


def test_a_size_that_is_told_late_counts_who_has_come() -> None:
    bench = Bench(batch=4, window=4, capacity=4)
    bench.join()
    assert bench.push(*members("g:0,1,2,3", SIZE_AT_CLOSE)) == (A, A, A, A)
    assert bench.push(member("g4", 4)) == (R,)
    assert "says that group g has 4 samples, and 4 of them have come" in bench.errors()[-1]
    assert bench.push(member("g5", 3)) == (R,)
    bench.perform(bench.core.close_group("g", bench.now))
    bench.hungry()
    assert bench.trained(0) == {"g0", "g1", "g2", "g3"}


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
    assert bench.core._ledger.steps.in_flight == committed
    assert bench.core.statistics().balanced


def test_the_first_member_may_be_the_one_that_is_refused() -> None:
    for keep, expected in ((False, (R, R, R)), (True, (A, A, A))):
        bench = Bench(keep_incomplete=keep)
        assert bench.push(member("g0", tokens=2000)) == (R,)
        assert bench.push(*members("g:1,2,3")) == expected
        assert bench.core.statistics().open_groups == 0
        # Where none of its members was accepted the id is free again.
        assert bench.push(member("g9", size=2)) == ((R,) if keep else (A,))


def test_a_group_that_is_closed_with_keep_is_trained_on_as_it_is() -> None:
    bench = Bench(durable=True)
    bench.push(*members("g:0,1"))
    bench.facts.clear()
    bench.perform(bench.core.close_group("g", bench.now, keep=True))
    at = bench.core.statistics()
    assert (at.ready, at.open_groups) == (2, 0)
    assert "GroupSized(tickets=(0, 1), size=2)" in str(bench.facts)


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
    bench.perform(bench.core.producer_disconnected("p", bench.now))
    bench.pass_time(100)
    assert bench.dropped(INCOMPLETE) == 0
    bench.perform(bench.core.producer_disconnected("q", bench.now))
    bench.pass_time(9.9)
    bench.core.producer_connected("q")  # it was away, and is back in time
    bench.pass_time(100)
    assert bench.dropped(INCOMPLETE) == 0
    bench.perform(bench.core.producer_disconnected("q", bench.now))
    bench.pass_time(10.1)
    assert bench.dropped(INCOMPLETE) == 2


# -- said twice, said late, said to nobody ---------------------------------------------------


def test_a_close_that_is_said_again_opens_nothing() -> None:
    bench = Bench(capacity=20)
    bench.push(*members("g:0,1", SIZE_AT_CLOSE))
    for _ in range(2):
        bench.perform(bench.core.close_group("g", bench.now, size=2))
    assert (bench.core.statistics().ready, bench.core.statistics().open_groups) == (2, 0)
    assert bench.push(*members("g:5,6", SIZE_AT_CLOSE)) == (R, R)
    bench.perform(bench.core.close_group("g", bench.now))
    assert (bench.core.statistics().ready, bench.core.statistics().open_groups) == (2, 0)


def test_a_group_that_is_told_of_and_never_begins_is_forgotten() -> None:
    bench = Bench(group_timeout=5.0)
    for number in range(300):
        bench.perform(bench.core.close_group(f"{number}", bench.now, size=2))
    assert bench.core.statistics().open_groups == 300
    bench.pass_time(6)
    assert bench.core.statistics().open_groups == 0


def test_a_group_that_is_told_to_be_larger_than_a_step_is_given_up() -> None:
    bench = Bench(batch=4)
    bench.push(*members("g:0,1", SIZE_AT_CLOSE))
    bench.perform(bench.core.close_group("g", bench.now, size=9))
    assert bench.dropped(INCOMPLETE) == 2
    assert bench.push(member("g2", SIZE_AT_CLOSE)) == (R,)
    assert "it has 9 samples, and a step takes at most 4" in bench.errors()[-1]


def test_two_refused_members_are_two_of_a_group_that_was_given_up() -> None:
    bench = Bench()
    pushed = [member("g0", tokens=2000), member("g1", tokens=2000), member("g2"), member("g3")]
    assert bench.push(*pushed) == (R, R, R, R)
    assert bench.push(*members("g:4,5,6,7")) == (A, A, A, A)  # the next epoch's
    assert bench.core.statistics().ready == 4


def test_a_refused_member_that_is_sent_again_is_lacking_once() -> None:
    bench = Bench(keep_incomplete=True)
    for _ in range(3):
        bench.perform(
            bench.core.push(Push("p", 0, (member("g0"), member("g1", tokens=2000))), bench.now)
        )
        bench.perform(bench.core.producer_disconnected("p", bench.now))
        bench.core.producer_connected("p")
    assert bench.core.statistics().ready == 0
    bench._next_seq = 2
    assert bench.push(*members("g:2,3")) == (A, A)
    assert bench.core.statistics().ready == 3


def test_a_withdrawn_member_is_lacking_and_others_are_told() -> None:
    bench = Bench()
    bench.push(*members("g:0,1"))
    for _ in range(2):  # said again after a reconnect
        bench.perform(bench.core.withdraw("g", 4, "p", [99], bench.now))
    assert bench.dropped(INCOMPLETE) == 2
    assert bench.push(member("g3")) == (R,)
    assert "a member was withdrawn by its producer" in bench.errors()[-1]
    assert bench.push(member("g9")) == (R,)


def test_the_first_that_is_heard_of_a_group_may_be_that_a_member_is_withdrawn() -> None:
    for keep, expected in ((False, (R, R, R)), (True, (A, A, A))):
        bench = Bench(keep_incomplete=keep)
        bench.perform(bench.core.withdraw("g", 4, "p", [99], bench.now))
        assert bench.push(*members("g:1,2,3")) == expected
        assert bench.core.statistics().open_groups == 0


def test_a_close_may_come_before_its_members_and_be_said_again() -> None:
    bench = Bench(capacity=20)
    for _ in range(2):
        bench.perform(bench.core.close_group("g", bench.now, size=2, request=("p", 0)))
    assert bench.push(*members("g:0,1", SIZE_AT_CLOSE)) == (A, A)
    bench.perform(bench.core.close_group("g", bench.now, size=2, request=("p", 0)))
    assert (bench.core.statistics().ready, bench.core.statistics().open_groups) == (2, 0)


def test_who_closes_a_group_of_which_nothing_is_known_is_told() -> None:
    bench = Bench()
    for _ in range(2):  # said again after a reconnect
        bench.perform(bench.core.close_group("gee", bench.now, request=("p", 0)))
    bench.push(*members("g:0,1"))
    bench.perform(bench.core.close_group("g", bench.now, request=("p", 1)))
    bench.perform(bench.core.close_group("g", bench.now, request=("p", 2)))
    [told] = [effect for effect in bench.log if isinstance(effect, Advised)]
    assert told.producer == "p"
    assert told.text.startswith("group gee is not known, so closing it changes nothing")


@pytest.mark.parametrize("size", [4, SIZE_AT_CLOSE])
def test_what_is_known_of_a_groups_size_outlives_the_dispatcher(size: int) -> None:
    bench = Bench(durable=True, keep_incomplete=True, capacity=20)
    bench.push(*members("g:0,1", size))
    bench.push(member("g2", size, tokens=2000))  # lacking from now on
    bench.push(*members("h:0,1,2", SIZE_AT_CLOSE))
    bench.perform(bench.core.close_group("h", bench.now, size=2))  # one more than was told
    bench.core = DispatcherCore(bench.core.config)
    bench.perform(bench.core.restore(bench.memory.remembered(), bench.now))
    assert bench.core.statistics().ready == 3
    assert bench.push(member("g3", size)) == (A,)
    if size == SIZE_AT_CLOSE:
        bench.perform(bench.core.close_group("g", bench.now))
    assert (bench.core.statistics().ready, bench.core.statistics().open_groups) == (6, 0)


def test_an_id_of_a_dropped_sample_may_be_pushed_again() -> None:
    bench = Bench()
    for group in ("g@0", "g@1"):
        sample = make_sample("0", group_id=group, group_size=2)
        push = Push("p", bench._next_seq, (sample,), named=True)
        bench._next_seq += 1
        bench.perform(bench.core.push(push, bench.now))
        bench.perform(bench.core.close_group(group, bench.now))
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
    (given_up,) = [effect for effect in bench.log if isinstance(effect, GroupEvicted)]
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
            assert not held or bench.core._buffer.ready_units >= 4, "a step can be planned"
            assert bench.core._buffer.held.nbytes <= 4 * SAMPLE
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
    bench.core.set_journal_capacity(lambda *_: room[0])
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
    bench.perform(bench.core.journal_takes_more(bench.now))
    assert bench.core.statistics().pushes_held == 0


def test_what_comes_in_when_room_is_made_is_looked_at_like_all_else() -> None:
    bench = Bench(batch=2, nbytes=3 * SAMPLE, drop_above=6)
    bench.join()
    bench.hungry()
    bench.push(member("g0", 2))
    bench.push(member("h0", 2))
    assert bench.push(member("g1", 2, tokens=7)) is None
    bench.pass_time(3)
    assert bench.dropped(NO_ROOM) == 1
    assert bench.dropped(DropReason.OVERSIZE) == 2
    assert bench.planned == []


def crowded() -> Bench:
    """A whole batch is ready; three producers wait with one each, two without their payloads."""
    bench = Bench(batch=4, window=4, capacity=4, held_bytes=1)
    bench.push_plain(4)
    for by in "abc":
        assert bench.push(*[make_sample(f"{by}{at}") for at in range(4)], by=by) is None
    bench.join()
    bench.train(0)  # of the first producer the payload is here; then the next is asked for its own
    bench.train(1)
    bench.hungry()
    return bench


def recalled(bench: Bench) -> list[str]:
    return [effect.producer for effect in bench.log if isinstance(effect, ResendRequested)]


def test_a_producer_that_dies_when_it_was_asked_to_resend_stops_nobody() -> None:
    bench = crowded()
    assert recalled(bench) == ["b"]
    bench.perform(bench.core.producer_disconnected("b", bench.now))
    assert recalled(bench) == ["b", "c"]


def test_a_producer_that_does_not_resend_holds_others_up_for_seconds_and_no_longer() -> None:
    bench = crowded()
    bench.pass_time(9.9)
    assert recalled(bench) == ["b"]
    bench.pass_time(0.2)
    assert recalled(bench) == ["b", "c"]


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
