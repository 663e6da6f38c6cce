"""Who is asked to release what nobody needs, and to find what nobody knows of."""

from dataclasses import replace

from rollout_dispatcher.core.buffer.objects import AWAY_S, MAX_INCARNATIONS, OrphanCollector
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import FreeRequested, SweepRequested
from rollout_dispatcher.core.references import (
    KEYS_AT_A_TIME,
    LONGEST_REST_S,
    Freed,
    Swept,
    WorkerGone,
    WorkerLeaves,
    WorkerThere,
)
from tests.support.core.objects import STORES, StoreBench


def bench_with(*workers: str) -> StoreBench:
    bench = StoreBench(batch=1000)
    for worker in workers:
        bench.worker(WorkerThere(worker))
    return bench


def refuse(bench: StoreBench, *firsts: int) -> list[str]:
    """Objects become unneeded in one turn, by pushes that are refused; returns their keys."""
    before = {*bench.objects}
    for first in firsts:
        bench.send(bench.put("p", first, 1, tokens=1001))
    bench.pass_time(0.0)
    return sorted(bench.objects - before)


def keys(wanted: FreeRequested | SweepRequested | None) -> list[str]:
    assert isinstance(wanted, FreeRequested)
    return sorted(wanted.keys)


def test_nobody_is_asked_for_more_than_a_message_takes() -> None:
    bench = bench_with()
    refuse(bench, *range(KEYS_AT_A_TIME + 1))
    bench.worker(WorkerThere("a"))
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


def test_answers_to_what_was_not_asked_change_nothing() -> None:
    bench = bench_with("a", "b")
    refuse(bench, 1)
    number = bench.asked["a"].number
    for answer in (
        Freed("b", number), Freed("a", number + 1), Swept("b", number), Freed("nobody", number),
    ):  # fmt: skip
        bench.worker(answer)
    assert bench.core.pending_store_work == 1
    bench.worker(Swept("a", number, ("p.1/7",)))
    assert bench.core.pending_store_work == 1, "not an answer to that: it is asked again"
    bench.answer_all()
    assert bench.core.pending_store_work == 0


def test_the_last_worker_is_held_until_the_list_is_empty() -> None:
    bench = bench_with("a", "b")
    bench.worker(WorkerLeaves("a"))
    assert not bench.core.is_last_to_free("a"), "nothing is to be done"
    gone = refuse(bench, 1)
    assert not bench.core.is_last_to_free("a"), "somebody else is there"
    bench.worker(WorkerLeaves("b"))
    assert bench.core.is_last_to_free("b")
    assert not bench.core.is_last_to_free("c")
    assert keys(bench.asked["b"] if "b" in bench.asked else bench.asked["a"]) == gone
    bench.answer_all()
    assert not bench.core.is_last_to_free("b")


# -- sweeps ---------------------------------------------------------------------------------


def test_a_producer_that_is_the_last_to_leave_is_swept_by_itself() -> None:
    bench = bench_with("producer p")
    bench.connect("p")
    bench.put("p", 0, 1)
    bench.leave("p")
    bench.worker(WorkerLeaves("producer p"))
    assert bench.core.is_last_to_free("producer p")
    bench.answer_all()
    assert not bench.core.is_last_to_free("producer p")
    bench.worker(WorkerGone("producer p"))
    bench.lose("p", for_good=True)
    assert bench.objects == set()
    assert bench.core.pending_store_work == 0, "so nobody waits for somebody who could do it"


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
    bench.worker(WorkerThere("a"))
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
    bench.worker(Swept("a", wanted.number, failed=True))
    assert isinstance(bench.asked["b"], SweepRequested)
    bench.crash()
    assert bench.core.pending_store_work == 1
    bench.worker(WorkerThere("b"))
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
