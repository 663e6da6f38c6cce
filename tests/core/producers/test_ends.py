"""Phases and streams end once every contributor has ended them; versions of steps."""

import pytest

from rollout_dispatcher.core.effects import Drained
from rollout_dispatcher.sample import Outcome
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

A, R = Outcome.ACCEPTED, Outcome.REFUSED


def push(bench: Bench, by: str, *names: str, version: int = 1) -> tuple[Outcome, ...] | None:
    return bench.push(*[make_sample(name, policy_version=version) for name in names], by=by)


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
        assert push(bench, "q", "late", version=2) == (R,)
        assert bench.errors()[-1] == "this producer has ended its stream"
    else:
        gone = bench.core.producer_disconnected("q", bench.now, for_good=leaves == "says goodbye")
        bench.perform(gone)
    if leaves == "stays away":
        assert bench.core.end_waits(2) == ["q"]
        bench.pass_time(10.1)
    assert bench.core.end_waits(2) == []


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


# -- versions ------------------------------------------------------------------------------------


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
