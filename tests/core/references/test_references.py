"""Who is asked to release what nobody needs, and to find what nobody knows of."""

from dataclasses import replace

import pytest

from rollout_dispatcher.core.buffer.objects import AWAY_S, MAX_INCARNATIONS, OrphanCollector
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import FreeWanted, SweepWanted
from rollout_dispatcher.core.references import (
    ANSWER_S,
    KEYS_AT_A_TIME,
    LONGEST_REST_S,
    Freed,
    Swept,
    WorkerGone,
    WorkerLeaves,
    WorkerThere,
)
from tests.support.core.objects import STORES, StoreBench, push_of
from tests.support.samples import make_sample


def bench_with(*workers: str) -> StoreBench:
    bench = StoreBench(batch=1000)
    for worker in workers:
        bench.hear(WorkerThere(worker))
    return bench


def refuse(bench: StoreBench, *firsts: int) -> list[str]:
    """Objects become unneeded in one turn, by pushes that are refused; returns their keys."""
    before = {*bench.objects}
    for first in firsts:
        bench.send(bench.put("p", first, 1, tokens=1001))
    bench.pass_time(0.0)
    return sorted(bench.objects - before)


def keys(wanted: FreeWanted | SweepWanted | None) -> list[str]:
    assert isinstance(wanted, FreeWanted)
    return sorted(wanted.keys)


def test_what_one_turn_has_made_unneeded_is_asked_of_one_worker() -> None:
    bench = bench_with("a", "b")
    gone = refuse(bench, 1, 2, 3)
    assert {who: keys(wanted) for who, wanted in bench.asked.items()} == {"a": gone}
    more = refuse(bench, 4)
    assert keys(bench.asked["b"]) == more, "the first one is at work"
    waiting = refuse(bench, 5, 6)
    bench.answer("b")
    assert keys(bench.asked["b"]) == waiting
    bench.answer_all()
    assert bench.objects == set()
    assert bench.core.pending_store_work == 0
    assert bench.memory.remembered().unneeded == ()
    assert bench.core.statistics().objects.freed == 6


def test_nobody_is_asked_for_more_than_a_message_takes() -> None:
    bench = bench_with()
    refuse(bench, *range(KEYS_AT_A_TIME + 1))
    bench.hear(WorkerThere("a"))
    assert len(keys(bench.asked["a"])) == KEYS_AT_A_TIME
    bench.answer("a")
    assert len(keys(bench.asked["a"])) == 1


def test_what_a_worker_could_not_release_is_asked_of_another_one() -> None:
    bench = bench_with("a", "b")
    gone = refuse(bench, 1, 2)
    bench.answer("a", left=gone[1:])
    assert list(bench.asked) == ["b"]
    assert keys(bench.asked["b"]) == gone[1:]
    bench.answer("b")
    assert bench.core.pending_store_work == 0
    assert bench.core.statistics().objects.failures == 1


def test_who_fails_is_asked_again_less_and_less_often_and_for_ever() -> None:
    bench = bench_with("a")
    gone, asked = refuse(bench, 1), []
    for _ in range(9):
        bench.answer("a", left=gone)
        begun = bench.now
        while not bench.asked:
            deadline = bench.core.next_deadline()
            assert deadline is not None
            bench.pass_time(deadline - bench.now)
        asked.append(bench.now - begun)
    assert asked == [1, 2, 4, 8, 16, 32, LONGEST_REST_S, LONGEST_REST_S, LONGEST_REST_S]
    bench.answer("a")
    refuse(bench, 2)
    assert bench.asked, "it can do that again, and is asked at once"


def test_what_a_worker_that_goes_was_asked_is_asked_of_others() -> None:
    bench = bench_with("a", "b")
    gone = refuse(bench, 1)
    bench.hear(WorkerGone("a"))
    assert keys(bench.asked["b"]) == gone
    bench.hear(WorkerThere("b"))  # again: whatever it was asked on its other connection
    assert keys(bench.asked["b"]) == gone


def test_a_worker_that_does_not_answer_is_not_waited_for() -> None:
    bench = bench_with("a")
    gone = refuse(bench, 1)
    slow = bench.asked["a"]
    bench.pass_time(ANSWER_S)
    bench.hear(WorkerThere("b"))
    assert keys(bench.asked["b"]) == gone
    bench.answer("b")
    bench.hear(Freed("a", slow.number, tuple(gone)))  # late, and no matter
    assert bench.core.pending_store_work == 0
    more = refuse(bench, 2)
    assert keys(bench.asked["b"] if "b" in bench.asked else bench.asked["a"]) == more


def test_answers_to_what_was_not_asked_change_nothing() -> None:
    bench = bench_with("a", "b")
    refuse(bench, 1)
    number = bench.asked["a"].number
    for said in (
        Freed("b", number), Freed("a", number + 1), Swept("b", number), Freed("nobody", number),
    ):  # fmt: skip
        bench.hear(said)
    assert bench.core.pending_store_work == 1
    bench.hear(Swept("a", number, ("p.1/7",)))
    assert bench.core.pending_store_work == 1, "not an answer to that: it is asked again"
    bench.answer_all()
    assert bench.core.pending_store_work == 0


def test_the_last_worker_is_held_until_the_list_is_empty() -> None:
    bench = bench_with("a", "b")
    bench.hear(WorkerLeaves("a"))
    assert not bench.core.is_last_to_free("a"), "nothing is to be done"
    gone = refuse(bench, 1)
    assert not bench.core.is_last_to_free("a"), "somebody else is there"
    bench.hear(WorkerLeaves("b"))
    assert bench.core.is_last_to_free("b")
    assert not bench.core.is_last_to_free("c")
    assert keys(bench.asked["b"] if "b" in bench.asked else bench.asked["a"]) == gone
    bench.answer_all()
    assert not bench.core.is_last_to_free("b")


# -- sweeps ---------------------------------------------------------------------------------


def test_what_a_producer_put_and_never_pushed_is_found_when_it_has_left() -> None:
    bench = bench_with("a")
    bench.connect("p")
    pushed = bench.put("p", 0, 1)
    bench.send(pushed)
    for first in (1, 2, 3, 4):
        bench.put("p", first, 1)
    bench.objects.add("p.11/0")  # of another incarnation, whose name begins alike
    bench.lose("p", for_good=True)
    bench.answer_all()
    assert bench.objects == {"p.1/0", "p.11/0"}
    assert bench.memory.remembered().incarnations == {}
    assert bench.core.statistics().objects.freed == 4


def test_a_producer_that_is_the_last_to_leave_is_swept_by_itself() -> None:
    bench = bench_with("producer p")
    bench.connect("p")
    bench.put("p", 0, 1)
    bench.leave("p")
    bench.hear(WorkerLeaves("producer p"))
    assert bench.core.is_last_to_free("producer p")
    bench.answer_all()
    assert not bench.core.is_last_to_free("producer p")
    bench.hear(WorkerGone("producer p"))
    bench.lose("p", for_good=True)
    assert bench.objects == set()
    assert bench.core.pending_store_work == 0, "so nobody waits for somebody who could do it"


def test_a_successor_ends_an_incarnation_and_keeps_what_it_puts_itself() -> None:
    bench = bench_with("a")
    bench.connect("p")
    bench.put("p", 0, 1)
    bench.lose("p")
    bench.connect("p", word="2")
    bench.put("p", 0, 1, word="2")
    bench.answer_all()
    assert bench.objects == {"p.2/0"}
    bench.connect("p", word="2")
    bench.answer_all()
    assert bench.objects == {"p.2/0"}, "only a reconnect"


def test_who_is_away_may_come_back_for_a_long_time() -> None:
    bench = bench_with("a")
    bench.connect("p")
    bench.put("p", 0, 1)
    bench.lose("p")
    bench.pass_time(AWAY_S - 1)
    assert not bench.asked
    bench.crash()
    bench.hear(WorkerThere("a"))
    bench.pass_time(AWAY_S - 1)
    assert not bench.asked, "it may not have noticed"
    bench.pass_time(1)
    bench.answer_all()
    assert bench.objects == set()


def test_at_the_end_of_the_stream_nobody_who_is_away_is_waited_for() -> None:
    bench = bench_with("a")
    bench.connect("p")
    bench.put("p", 0, 1)
    bench.lose("p")
    bench.perform(bench.core.end_stream(bench.now, force=True))
    bench.pass_time(0)
    bench.answer_all()
    assert bench.objects == set()


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_what_a_client_without_an_incarnation_may_send_again_is_not_waited_for_longer(
    *, ends: bool, crashes: bool
) -> None:
    bench = StoreBench(batch=2, window=2, capacity=2)
    samples = [make_sample(name) for name in "abc"]
    bench.objects = {"theirs"}
    bench.send(push_of("p", 0, "theirs", samples))  # one has no room, and may be sent again
    bench.lose("p")
    if crashes:
        bench.crash()
    bench.hear(WorkerThere("a"))
    bench.join()
    bench.hungry()
    bench.train(0)
    bench.pass_time(AWAY_S - 1)
    assert not bench.asked
    if ends:
        bench.perform(bench.core.end_stream(bench.now, force=True))
    bench.pass_time(0 if ends else 1)
    bench.answer_all()
    assert bench.objects == set()
    assert bench.core.statistics().objects.needed == 0


def test_a_process_that_opens_no_stores_waits_for_no_sweep_and_leaves_it_to_the_next() -> None:
    bench = bench_with("a")
    bench.connect("p")
    bench.put("p", 0, 1)
    bench.lose("p")
    config = bench.core.config
    bench.core = DispatcherCore(replace(config, limits=replace(config.limits, stores=frozenset())))
    bench.perform(bench.core.restore(bench.memory.remembered(), bench.now))
    bench.perform(bench.core.end_stream(bench.now, force=True))
    assert bench.core.pending_store_work == 0
    bench.core = DispatcherCore(config)
    bench.crash()
    bench.hear(WorkerThere("a"))
    bench.pass_time(AWAY_S)
    bench.answer_all()
    assert bench.objects == set()
    assert bench.memory.remembered().incarnations == {}


def test_a_sweep_that_fails_is_made_again_and_outlives_the_process() -> None:
    bench = bench_with("a", "b")
    bench.connect("p")
    bench.put("p", 0, 1)
    bench.lose("p", for_good=True)
    wanted = bench.asked.pop("a")
    bench.hear(Swept("a", wanted.number, failed=True))
    assert isinstance(bench.asked["b"], SweepWanted)
    bench.crash()
    assert bench.core.pending_store_work == 1
    bench.hear(WorkerThere("b"))
    bench.answer_all()
    assert bench.objects == set()
    assert bench.core.pending_store_work == 0


def test_incarnations_that_nobody_can_sweep_are_forgotten_beyond_a_bound() -> None:
    sweeps = OrphanCollector(STORES)
    for word in range(MAX_INCARNATIONS):
        sweeps.begins("p", f"p.{word}")
    assert sweeps.forget_oldest() is None
    sweeps.begins("p", "p.last")
    assert sweeps.forget_oldest() == "p.0"
    assert len(sweeps) == MAX_INCARNATIONS - 1
    assert sweeps.assign(next(iter(sweeps.stores))).name == "p.1"
    sweeps.disconnected("p", 0.0, for_good=True)


def test_who_is_connected_is_never_forgotten_however_long_ago_it_came() -> None:
    sweeps = OrphanCollector(STORES)
    sweeps.begins("old", "old.1")
    for word in range(MAX_INCARNATIONS):
        sweeps.begins(f"p{word}", f"p{word}.1")
        if word % 2:
            sweeps.disconnected(f"p{word}", 0.0, for_good=False)
    assert sweeps.forget_oldest() == "p1.1", "the oldest of those that are away"
    assert sweeps.current("old") == "old.1"
    assert sweeps.may_push("old.1/7")
    assert not sweeps.may_push("p1.1/7")


def test_keys_of_others_are_not_released_whatever_a_worker_says() -> None:
    bench = bench_with("a")
    bench.connect("p")
    bench.lose("p", for_good=True)
    wanted = bench.asked.pop("a")
    bench.hear(Swept("a", wanted.number, ("q.1/0", "p.11/0", "p.1/3")))
    assert keys(bench.asked["a"]) == ["p.1/3"]


def test_keys_of_a_producer_whose_name_begins_like_an_incarnation_are_not_released() -> None:
    bench = bench_with("a")
    bench.connect("p")
    bench.connect("p.1/q")
    bench.put("p.1/q", 0, 1)
    bench.put("p", 0, 1)
    bench.lose("p", for_good=True)
    bench.answer_all()
    assert bench.objects == {"p.1/q.1/0"}


@pytest.mark.parametrize("now", [0.1, 0.25, 1 / 3])
def test_who_is_away_has_ended_at_the_deadline_that_was_said(now: float) -> None:
    """0.1 + 3600 - 3600 is less than 0.1: another deadline would have been due at once."""
    bench = bench_with("a")
    bench.now = now
    bench.connect("p")
    bench.lose("p")
    while (deadline := bench.core.next_deadline()) is not None:
        assert deadline > bench.now
        bench.now = deadline
        bench.perform(bench.core.tick(bench.now))
