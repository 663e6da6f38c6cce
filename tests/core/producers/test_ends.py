"""Phases and streams end when everybody who contributed has said so; versions of steps."""

import pytest

from rollout_dispatcher.core.buffer.phases import Freshness, NextStep, StalenessPolicy
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Drained
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.sample import Outcome
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

A, R = Outcome.ACCEPTED, Outcome.REFUSED
INCOMPLETE = DropReason.INCOMPLETE_GROUP


def push(bench: Bench, by: str, *names: str, version: int = 1) -> tuple[Outcome, ...] | None:
    return bench.push(*[make_sample(name, policy_version=version) for name in names], by=by)


def test_a_phase_ends_when_all_who_contributed_to_it_have_said_so() -> None:
    bench = Bench(batch=4, window=4, capacity=20)
    bench.join()
    push(bench, "p", "p0")
    push(bench, "q", "q0")
    half = make_sample("g0", policy_version=1, group_id="g", group_size=2)
    bench.push(half, by="q")
    bench.core.producer_connected("idle")
    bench.perform(bench.core.end_phase(2, bench.now, "p"))
    assert bench.core.end_waits(2) == ["q"]
    assert push(bench, "p", "late") == (R,)  # its own word binds it
    assert push(bench, "q", "q1") == (A,)
    bench.push(make_sample("g1", policy_version=1, group_id="g", group_size=2), by="q")
    assert bench.dropped(INCOMPLETE) == 0
    push(bench, "p", *[f"new{at}" for at in range(4)], version=2)
    bench.hungry()
    bench.pass_time(3)
    bench.perform(bench.core.end_phase(2, bench.now, "q"))
    assert bench.core.end_waits(2) == []
    assert push(bench, "q", "later") == (R,)
    for step in range(len(bench.planned)):
        bench.train(step)
    versions = [
        {sample.policy_version for sample in bench.core._ledger.steps[step].samples()}
        for step in bench.core._ledger.steps
    ]
    assert all(found in ({1}, {2}) for found in versions)


def test_a_slow_workers_first_sample_of_a_phase_comes_after_a_fast_ones_last() -> None:
    bench = Bench(batch=4, window=4, capacity=20)
    for producer in ("fast", "slow"):
        push(bench, producer, f"{producer}0", version=0)
    for producer in ("fast", "slow"):
        bench.perform(bench.core.end_phase(1, bench.now, producer))
    push(bench, "fast", "fast1", version=1)
    bench.perform(bench.core.end_phase(2, bench.now, "fast"))
    assert bench.core.end_waits(2) == ["slow"]
    assert push(bench, "slow", "slow1", version=1) == (A,)
    bench.perform(bench.core.end_phase(2, bench.now, "slow"))
    assert bench.core.end_waits(2) == []
    assert push(bench, "slow", "later", version=1) == (R,)


@pytest.mark.parametrize("leaves", ["ends its stream", "says goodbye", "stays away"])
def test_a_phase_waits_for_nobody_who_is_done_with_the_run(leaves: str) -> None:
    bench = Bench(batch=4, window=4, capacity=20, producer_timeout=10.0)
    for producer in "pq":
        push(bench, producer, f"{producer}0", version=0)
    for producer in "pq":
        bench.perform(bench.core.end_phase(1, bench.now, producer))
    bench.perform(bench.core.end_phase(2, bench.now, "p"))
    assert bench.core.end_waits(2) == ["q"]
    if leaves == "ends its stream":
        bench.perform(bench.core.end_stream(bench.now, "q"))
    else:
        gone = bench.core.producer_disconnected("q", bench.now, for_good=leaves == "says goodbye")
        bench.perform(gone)
    if leaves == "stays away":
        assert bench.core.end_waits(2) == ["q"]
        bench.pass_time(10.1)
    assert bench.core.end_waits(2) == []


@pytest.mark.parametrize("for_good", [True, False])
def test_who_is_gone_is_not_waited_for(for_good: bool) -> None:
    bench = Bench(producer_timeout=10.0)
    push(bench, "p", "p0")
    push(bench, "q", "q0")
    bench.perform(bench.core.end_stream(bench.now, "p"))
    bench.perform(bench.core.producer_disconnected("q", bench.now, for_good=for_good))
    if not for_good:
        assert bench.core.end_waits(None) == ["q"]
        bench.pass_time(9.9)
        assert bench.core.statistics().run_state == "running"
        bench.pass_time(0.2)
    assert bench.core.statistics().run_state == "ended"


def test_a_worker_with_nothing_to_do_does_not_end_what_others_have_not_begun() -> None:
    bench = Bench()
    for producer in "pq":
        bench.core.producer_connected(producer)
    bench.perform(bench.core.end_stream(bench.now, "p"))
    assert bench.core.statistics().run_state == "running"
    assert push(bench, "q", "q0") == (A,)
    bench.perform(bench.core.end_stream(bench.now, "q"))
    assert bench.core.statistics().run_state == "ended"


def test_nor_does_a_restart_end_it() -> None:
    bench = Bench(durable=True)
    for producer in "pq":
        bench.core.producer_connected(producer)
    bench.perform(bench.core.end_stream(bench.now, "p"))
    bench.core = DispatcherCore(bench.core.config)
    bench.perform(bench.core.restore(bench.memory.remembered(), bench.now))
    bench.perform(bench.core.tick(bench.now))
    assert bench.core.statistics().run_state == "running"
    assert push(bench, "q", "q0") == (A,)
    bench.perform(bench.core.end_stream(bench.now, "q"))
    assert bench.core.statistics().run_state == "ended"


def test_one_producers_end_is_not_the_others() -> None:
    bench = Bench(batch=4, window=4, capacity=8)
    bench.join()
    push(bench, "p", "p0", "p1")
    push(bench, "q", "q0")
    bench.perform(bench.core.end_stream(bench.now, "p"))
    assert push(bench, "p", "late") == (R,)
    assert push(bench, "q", "q1") == (A,)
    bench.train(0)
    assert push(bench, "q", "q2") == (A,)
    bench.perform(bench.core.end_stream(bench.now, "q"))
    bench.train(1)
    assert bench.log[-1] == Drained("done")
    assert bench.core.statistics().samples_committed == 5


def test_the_end_waits_for_the_word_of_whom_the_buffer_has_held_back() -> None:
    bench = Bench(batch=4, window=4, capacity=4)
    push(bench, "p", "p0", "p1", "p2", "p3")
    assert push(bench, "q", "q0") is None
    bench.perform(bench.core.end_stream(bench.now, "p"))
    assert bench.core.end_waits(None) == ["q"]
    bench.join()
    bench.train(0)
    assert push(bench, "q", "q1") == (A,)
    bench.perform(bench.core.end_stream(bench.now, "q"))
    bench.train(1)
    assert bench.log[-1] == Drained("done")
    assert bench.core.statistics().samples_committed == 6


def test_a_controller_may_end_everything_and_what_waits_comes_in_first() -> None:
    bench = Bench(batch=4, window=4, capacity=4)
    push(bench, "p", "p0", "p1", "p2", "p3")
    assert push(bench, "q", "q0") is None
    bench.perform(bench.core.end_stream(bench.now, force=True))
    assert push(bench, "r", "late") == (R,)
    assert bench.core.statistics().run_state == "running"  # what was held back is still to come in
    bench.join()
    bench.train(0)
    bench.train(1)
    assert bench.log[-1] == Drained("done")
    assert bench.core.statistics().samples_committed == 5


def test_a_forced_phase_does_not_end_the_stream_that_a_producer_has_ended() -> None:
    bench = Bench()
    push(bench, "p", "p0")
    push(bench, "q", "q0")
    bench.perform(bench.core.end_stream(bench.now, "p"))
    bench.perform(bench.core.end_phase(2, bench.now, force=True))
    assert bench.core.statistics().run_state == "running"
    assert push(bench, "q", "late") == (R,)
    assert push(bench, "q", "new", version=2) == (A,)


def test_a_group_belongs_to_the_phase_of_its_oldest_member_whole() -> None:
    bench = Bench(batch=2, window=4, capacity=20)
    versions = {"g0": 1, "h0": 2, "h1": 2, "g1": 2}
    for name, version in versions.items():
        sample = make_sample(name, policy_version=version, group_id=name[0], group_size=2)
        bench.push(sample)
    bench.perform(bench.core.end_phase(2, bench.now, "p"))
    bench.join()
    assert bench.trained(0) == {"g0", "g1"}
    bench.train(0)
    assert bench.trained(1) == {"h0", "h1"}


@pytest.mark.parametrize("says_so", [True, False])
def test_what_producers_have_said_outlives_the_dispatcher(says_so: bool) -> None:
    bench = Bench(durable=True, producer_timeout=10.0)
    push(bench, "p", "p0")
    push(bench, "q", "q0")
    bench.perform(bench.core.end_stream(bench.now, "p"))
    bench.core = DispatcherCore(bench.core.config)
    bench.perform(bench.core.restore(bench.memory.remembered(), bench.now))
    for producer in "pq":
        bench.core.producer_connected(producer)
    assert push(bench, "p", "late") == (R,)
    assert bench.core.statistics().run_state == "running"
    if says_so:
        bench.perform(bench.core.end_stream(bench.now, "q"))
    else:
        bench.perform(bench.core.producer_disconnected("q", bench.now, for_good=True))
    assert bench.core.statistics().run_state == "ended"


# -- versions ------------------------------------------------------------------------------------


def test_on_policy_samples_of_several_steps_a_version_are_all_trained_on() -> None:
    bench = Bench(batch=8, window=8, capacity=64, max_staleness=0, steps_per_version=4)
    bench.join()
    for version in range(3):
        bench.perform(bench.core.set_policy_version(version, bench.now, 4 * version))
        names = [f"{version}.{at}" for at in range(32)]
        push(bench, "p", *names, version=version)
        for step in range(4 * version, 4 * version + 4):
            bench.hungry()
            bench.train(step)
    at = bench.core.statistics()
    assert (at.samples_committed, at.dropped[DropReason.STALE]) == (96, 0)


@pytest.mark.parametrize(
    ("per_version", "number", "committed", "expected"),
    [
        (1, 10, 9, 5),  # nothing open: what was reported
        (1, 12, 9, 7),  # two open steps before it
        (1, 12, 11, 5),  # committed since, the next report is on its way
        (4, 13, 9, 5),
        (4, 14, 9, 6),
        (4, 14, 13, 5),
        (4, 19, 13, 7),
    ],
)
def test_the_version_that_a_step_will_train_with(
    per_version: int, number: int, committed: int, expected: int
) -> None:
    freshness = Freshness(0, StalenessPolicy.DROP, per_version)
    assert freshness.training_version(NextStep(number, committed)) is None
    assert freshness.report(5, first_step=10)
    assert not freshness.report(4, first_step=11)
    assert freshness.training_version(NextStep(number, committed)) == expected


def test_of_many_ends_that_wait_the_first_are_named_and_the_others_counted() -> None:
    bench = Bench()
    push(bench, "slow", "s0", version=0)
    for version in (9, 3, 5, 4, 8, 7):
        bench.perform(bench.core.end_phase(version, bench.now, "fast"))
    words = bench.core.waits_for(bench.now).split("; ")
    assert [text for text in words if "end" in text] == [
        *[f"the end of the phase before {end} waits for producer slow" for end in (3, 4, 5, 7)],
        "2 more ends wait for these",
    ]
