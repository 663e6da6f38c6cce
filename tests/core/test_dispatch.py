"""The whole core under a virtual clock: from pushes to committed steps."""

import pytest

from rollout_dispatcher.core.effects import (
    Drained,
    EndRanks,
    SamplesAccepted,
    WelcomeProducer,
    WelcomeRank,
)
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.ends import EndReason
from tests.support.core.cores import Bench
from tests.support.samples import make_sample


def test_accepted_samples_are_reported_once() -> None:
    bench = Bench(batch=4, window=8, capacity=8, reports_accepted=True)
    bench.push_plain(5)
    bench.push(*(make_sample(f"g/{at}", group_id="g", group_size=2) for at in range(2)))
    bench.push_plain(1)
    bench.push_plain(2)  # two that wait come in at once
    bench.push_plain(2)
    bench.join()
    reported = [effect for effect in bench.log if isinstance(effect, SamplesAccepted)]
    tickets = [[entry.ticket for entry in effect.entries] for effect in reported]
    assert tickets == [[0, 1, 2, 3, 4], [5, 6], [7], [8, 9, 10, 11]]


def test_draining_with_no_ranks_drops_and_counts_what_is_buffered() -> None:
    bench = Bench()
    bench.push_plain(3)
    bench.perform(bench.core.drain(bench.now))
    assert bench.dropped(DropReason.SHUTDOWN) == 3
    assert Drained("drained") in bench.log[-2:], "drops are reported with it"
    assert (bench.core.shutdown_drops.samples, bench.core.shutdown_drops.reasons) == (
        3,
        {DropReason.SHUTDOWN: 3},
    )
    assert str(bench.core.shutdown_drops).endswith("(shutdown 3): p/0, p/1, p/2")


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "not noticed yet"])
def test_a_rank_whose_connection_broke_at_the_end_is_sent_the_end_again(noticed: bool) -> None:
    bench = Bench()
    bench.join()
    bench.perform(bench.core.end_stream(bench.now, "p"))
    if noticed:
        bench.perform(bench.core.leave(1, "r1", bench.now))
    bench.log.clear()
    bench.perform(bench.core.join(RankHello("r1", 1, 2, 1), bench.now))
    assert bench.log == [
        WelcomeRank("r1", 1, "run", 1, -1),
        EndRanks((1,), EndReason.ENDED),
    ]


@pytest.mark.parametrize("hungry_first", [True, False])
def test_waiting_for_a_slow_producer_asks_for_no_ticks(hungry_first: bool) -> None:
    bench = Bench()
    bench.join()
    if hungry_first:
        bench.hungry()
    bench.push_plain(3)
    assert bench.core.next_deadline() is None


def test_a_producers_hello_is_answered_with_its_credits_and_rests_on_no_fact() -> None:
    decision = Bench(durable=True, producer_credits=3).core.producer_connected("p")
    assert decision.effects == [WelcomeProducer("p", 3)]
    assert decision.facts == ()


def test_a_core_whose_facts_nobody_keeps_notes_none() -> None:
    bench = Bench()
    bench.join()
    bench.push_plain(6)
    bench.train(0)
    assert bench.core.statistics().samples_committed == 4
    assert bench.facts == []


def test_an_unbalanced_batch_waits_for_max_wait_of_hunger() -> None:
    bench = Bench()
    bench.join()
    for tokens in (1, 1, 1, 700):
        bench.push(make_sample(f"s{bench._next_seq}", tokens))
    assert bench.planned == []
    bench.pass_time(60)
    assert bench.planned == []  # nobody is hungry yet
    bench.hungry()
    bench.pass_time(1.9)
    assert bench.planned == []
    bench.pass_time(0.2)
    assert bench.triggers == [Trigger.MAX_WAIT]


def test_a_held_producer_goes_on_when_dropping_makes_room() -> None:
    bench = Bench(batch=4, window=4, capacity=4, drop_above=50)
    bench.push_plain(3)
    bench.push(make_sample("long", 51))
    assert bench.push(make_sample("late")) is None
    bench.join()
    assert bench.triggers == [Trigger.WINDOW_FULL]
    assert bench.dropped(DropReason.OVERSIZE) == 1
    assert bench.core.statistics().balanced
