"""In words, why no step is planned: what lacks and who could bring it."""

import pytest

from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.core.waiting import Cause
from tests.support.core.cores import Bench
from tests.support.core.objects import StoreBench
from tests.support.samples import make_sample


def reasons(bench: Bench) -> dict[Cause, str]:
    return {each.cause: each.text for each in bench.core.reasons(bench.now)}


def test_before_anybody_is_there_ranks_samples_and_producers_lack() -> None:
    bench = Bench()
    assert reasons(bench) == {
        Cause.MISSING_RANKS: "DP ranks 0, 1 not joined yet",
        Cause.SAMPLES: "0 of 4 samples are ready",
        Cause.PRODUCERS: "no producer is connected",
    }
    bench.perform(bench.core.producer_connected("p"))
    bench.perform(bench.core.join(RankHello("r0", 0, 2, None), bench.now))
    assert reasons(bench) == {
        Cause.MISSING_RANKS: "DP rank 1 not joined yet",
        Cause.SAMPLES: "0 of 4 samples are ready",
    }


def test_open_groups_are_named_with_their_producers() -> None:
    bench = Bench()
    bench.join()
    bench.push(make_sample("s", group_id="g", group_size=3), by="worker")
    bench.pass_time(7.0)
    assert reasons(bench)[Cause.OPEN_GROUPS] == (
        "1 open group holds 1 sample; the oldest is group g (1 of 3), of producer worker, and has "
        "not grown for 7 s"
    )


@pytest.mark.parametrize(
    ("hungry", "words"),
    [(False, "no rank waits yet"), (True, "ranks wait for 1.5 of --max-wait 2 s")],
)
def test_a_batch_that_waits_for_a_better_plan_is_no_riddle(hungry: bool, words: str) -> None:
    bench = Bench(target_excess=-1.0)  # which no plan reaches
    bench.join()
    if hungry:
        bench.hungry()
    bench.push_plain(5)
    bench.pass_time(1.5)
    assert bench.planned == []
    assert reasons(bench)[Cause.WINDOW] == f"5 of 6 samples of the window are ready, and {words}"
    assert "nobody" not in bench.core.waits_for(bench.now)


def test_a_step_whose_samples_ranks_have_not_fetched_names_them_and_says_so() -> None:
    bench = StoreBench(max_open_steps=1)
    bench.join()
    bench.hungry()
    bench.send(bench.put("p", 0, 6))
    assert reasons(bench)[Cause.OPEN_STEPS] == (
        "1 open step: step 0 is not prepared by DP ranks 0, 1, which need its samples from payload "
        "stores"
    )
    bench.hold(0)
    assert "step 0 is not committed by DP ranks 0, 1" in bench.core.waits_for(bench.now)


def test_a_rank_that_never_asks_for_a_step_is_named() -> None:
    """The step is planned, and nobody gets it: that rank may still load a checkpoint."""
    bench = Bench()
    bench.join()
    bench.perform(bench.core.demand(0, -1, bench.now, hungry=True))
    bench.push_plain(4)
    assert reasons(bench)[Cause.SILENT_RANKS] == "DP rank 1 did not ask for a first step yet"
    bench.perform(bench.core.demand(1, -1, bench.now, hungry=True))
    assert Cause.SILENT_RANKS not in reasons(bench)


def test_a_step_that_is_not_committed_names_the_ranks() -> None:
    bench = Bench(max_open_steps=1)
    bench.join()
    bench.hungry()
    bench.push_plain(6)
    assert reasons(bench)[Cause.OPEN_STEPS] == (
        "1 open step: step 0 is not committed by DP ranks 0, 1"
    )


def test_a_lost_rank_is_named_and_nothing_is_when_a_step_is_under_way() -> None:
    bench = Bench()
    bench.join()
    bench.perform(bench.core.leave(1, "r1", bench.now))
    assert reasons(bench)[Cause.ABSENT_RANKS] == "DP rank 1 lost the connection"


def test_a_run_that_is_over_waits_for_nobody_and_says_why() -> None:
    bench = Bench()
    bench.perform(bench.core.end_stream(bench.now, force=True))
    assert reasons(bench) == {Cause.OVER: "no further step: the stream has ended"}
