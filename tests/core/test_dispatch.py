"""The whole core under a virtual clock: from pushes to committed steps."""

from typing import Any

import pytest

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.phases import StalenessPolicy
from rollout_dispatcher.core.effects import (
    Deliver,
    Drained,
    EndRanks,
    PushAnswered,
    SamplesAccepted,
    WelcomeProducer,
    WelcomeRank,
)
from rollout_dispatcher.core.facts import Accepted, DropReason, SchemaFixed
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.sample import Outcome, SamplesByField
from tests.support.core.cores import Bench
from tests.support.samples import make_sample


def test_nothing_is_planned_before_every_rank_is_there() -> None:
    bench = Bench()
    bench.push_plain(6)
    assert bench.planned == []
    bench.join()
    assert bench.triggers == [Trigger.WINDOW_FULL]
    assert {type(effect) for effect in bench.log if isinstance(effect, Deliver)} == {Deliver}


def test_a_full_window_is_planned_and_what_is_passed_over_counts_a_skip() -> None:
    bench = Bench()
    lengths = (1, 1, 1, 1, 1, 900)
    bench.push(*[make_sample(f"s{at}", tokens) for at, tokens in enumerate(lengths)])
    bench.join()
    assert bench.triggers == [Trigger.WINDOW_FULL]
    left = bench.core._buffer.ready(9)
    assert [entry.skips for entry in left] == [1, 1]


def test_a_balanced_batch_goes_before_the_window_is_full() -> None:
    bench = Bench()
    bench.join()
    bench.push_plain(4)
    assert bench.triggers == [Trigger.TARGET_EXCESS]


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


def test_a_producer_is_held_when_the_buffer_is_full_and_goes_on_after_a_step() -> None:
    bench = Bench(batch=4, window=4, capacity=4)
    bench.push_plain(4)
    assert bench.push(make_sample("late")) is None
    bench.join()
    answers = [effect for effect in bench.log if isinstance(effect, PushAnswered)]
    assert answers[-1].outcomes == (Outcome.ACCEPTED,)


def test_what_came_in_is_told_once_and_field_by_field_where_that_is_known() -> None:
    bench = Bench(batch=4, window=8, capacity=8, tells_accepted=True)
    bench.push_plain(5)
    bench.push(*(make_sample(f"g/{at}", group_id="g", group_size=2) for at in range(2)))
    bench.push_plain(1)
    bench.push_plain(2)  # two that wait come in at once
    bench.push_plain(2)
    bench.join()
    told = [effect for effect in bench.log if isinstance(effect, SamplesAccepted)]
    tickets = [[entry.ticket for entry in effect.entries] for effect in told]
    assert tickets == [[0, 1, 2, 3, 4], [5, 6], [7], [8, 9, 10, 11]]
    for effect, is_plain in zip(told, (True, False, True, False), strict=True):
        fields = SamplesByField.of(entry.sample for entry in effect.entries)
        assert effect.plain == (fields if is_plain else None)


def test_a_byte_cap_that_holds_less_than_a_batch_yields_a_smaller_step_and_counts_it() -> None:
    bench = Bench(batch=4, window=6, capacity=6, nbytes=3 * 32)
    bench.join()
    for _ in range(4):
        bench.push_plain(1)
    bench.pass_time(60)
    assert bench.triggers == []  # nobody is hungry yet
    bench.hungry()
    bench.pass_time(1.9)
    assert bench.triggers == []
    bench.pass_time(0.2)
    assert bench.triggers == [Trigger.BUFFER_FULL]
    assert len(bench.planned[0].tokens) == 3
    assert bench.core.statistics().small_steps == 1


def test_steps_follow_each_other_as_ranks_train() -> None:
    bench = Bench(batch=4, window=4, capacity=8)
    bench.join()
    bench.push_plain(8)
    assert len(bench.planned) == 1  # one step ahead of training and no more
    bench.train(0)
    assert len(bench.planned) == 2
    bench.train(1)
    at = bench.core.statistics()
    assert (at.steps_committed, at.samples_committed, at.buffered) == (2, 8, 0)
    assert at.balanced


def test_a_group_is_dropped_whole_once_it_has_not_grown_for_long_and_its_producer_is_gone() -> None:
    bench = Bench(group_timeout=5.0)
    bench.join()
    bench.push(*[make_sample(f"g{at}", group_id="g", group_size=3) for at in range(2)])
    bench.pass_time(60)
    assert bench.dropped(DropReason.INCOMPLETE_GROUP) == 0  # a rollout may take its time
    bench.push(make_sample("h0", group_id="h", group_size=3))
    bench.perform(bench.core.producer_disconnected("p", bench.now, for_good=True))
    assert bench.dropped(DropReason.INCOMPLETE_GROUP) == 0
    bench.pass_time(0.1)
    assert bench.dropped(DropReason.INCOMPLETE_GROUP) == 2
    bench.pass_time(4.8)
    assert bench.dropped(DropReason.INCOMPLETE_GROUP) == 2
    bench.pass_time(0.2)
    assert bench.dropped(DropReason.INCOMPLETE_GROUP) == 3
    assert bench.core.statistics().balanced


def test_a_group_that_its_producer_closes_is_dropped_whole() -> None:
    bench = Bench()
    bench.push(make_sample("g0", group_id="g", group_size=2))
    bench.perform(bench.core.close_group("g", bench.now))
    assert bench.dropped(DropReason.INCOMPLETE_GROUP) == 1


def test_groups_go_into_one_step_whole() -> None:
    bench = Bench(batch=4, window=6, capacity=6)
    bench.join()
    for group in ("g", "h", "i"):
        members = [make_sample(f"{group}{at}", group_id=group, group_size=2) for at in range(2)]
        bench.push(*members)
    step = bench.core._ledger.steps[0]
    chosen = [sample.group_id for sample in step.samples()]
    assert len(chosen) == 4
    assert all(chosen.count(group) == 2 for group in chosen)


def test_too_stale_samples_are_dropped_and_expiring_ones_go_first() -> None:
    bench = Bench(batch=2, window=6, capacity=6, max_staleness=1)
    versions = (3, 3, 5, 5, 4, 4)
    bench.push(*[make_sample(f"v{at}", policy_version=v) for at, v in enumerate(versions)])
    bench.perform(bench.core.set_policy_version(5, bench.now, 0))
    bench.join()
    assert bench.dropped(DropReason.STALE) == 2
    chosen = {sample.policy_version for sample in bench.core._ledger.steps[0].samples()}
    assert chosen == {4}
    assert bench.core.statistics().balanced


def test_oversize_samples_may_be_dropped_with_their_groups_and_counted() -> None:
    bench = Bench(batch=4, window=6, capacity=8, drop_above=50)
    members = [make_sample(f"g{at}", 10 + 50 * at, group_id="g", group_size=2) for at in range(2)]
    bench.push(*members, make_sample("long", 51), make_sample("short", 50))
    bench.join()
    assert bench.dropped(DropReason.OVERSIZE) == 3
    assert len(bench.core._buffer) == 1
    assert bench.core.statistics().balanced


@pytest.mark.parametrize("option", [{"drop_above": 50}, {"max_staleness": 1}])
def test_looking_for_samples_to_drop_does_not_forget_that_producers_are_held(
    option: dict[str, Any],
) -> None:
    bench = Bench(batch=4, window=8, capacity=6, **option)
    bench.perform(bench.core.set_policy_version(1, bench.now, 0))
    for group in ("g", "h", "i"):
        named = [f"{group}{at}" for at in range(3)]
        bench.push(
            *[make_sample(at, group_id=group, group_size=3, policy_version=1) for at in named]
        )
    assert bench.core.statistics().pushes_held == 1
    bench.join()
    assert bench.triggers[0] is Trigger.BUFFER_FULL
    assert len(bench.planned[0].tokens) == 3


def test_a_held_producer_goes_on_when_dropping_makes_room() -> None:
    bench = Bench(batch=4, window=4, capacity=4, drop_above=50)
    bench.push_plain(3)
    bench.push(make_sample("long", 51))
    assert bench.push(make_sample("late")) is None
    bench.join()
    assert bench.triggers == [Trigger.WINDOW_FULL]
    assert bench.dropped(DropReason.OVERSIZE) == 1
    assert bench.core.statistics().balanced


def test_prefer_oldest_drops_nothing() -> None:
    bench = Bench(
        batch=2,
        window=4,
        capacity=4,
        max_staleness=1,
        staleness_policy=StalenessPolicy.PREFER_OLDEST,
    )
    versions = (5, 5, 1, 2)
    bench.push(*[make_sample(f"v{at}", policy_version=v) for at, v in enumerate(versions)])
    bench.perform(bench.core.set_policy_version(5, bench.now, 0))
    bench.join()
    assert bench.dropped(DropReason.STALE) == 0
    chosen = {sample.policy_version for sample in bench.core._ledger.steps[0].samples()}
    assert chosen == {1, 2}


def test_an_ended_phase_is_flushed_before_anything_newer_is_planned() -> None:
    bench = Bench(batch=4, window=6, capacity=20)
    old = [make_sample(f"old{at}", policy_version=1) for at in range(5)]
    new = [make_sample(f"new{at}", policy_version=2) for at in range(6)]
    bench.push(*old)
    bench.perform(bench.core.end_phase(2, bench.now, "p"))
    bench.push(*new)
    bench.join()
    for step in range(3):
        versions = {sample.policy_version for sample in bench.core._ledger.steps[step].samples()}
        assert versions == ({1} if step < 2 else {2})
        bench.train(step)
    assert [len(step.tokens) for step in bench.planned] == [4, 1, 4]


def test_a_late_sample_of_an_ended_phase_is_refused() -> None:
    bench = Bench()
    bench.perform(bench.core.end_phase(2, bench.now, "p"))
    assert bench.push(make_sample("late", policy_version=1)) == (Outcome.REFUSED,)


def test_the_end_of_the_stream_flushes_what_is_left_and_ends_the_ranks() -> None:
    bench = Bench(batch=4, window=6, capacity=8)
    bench.join()
    bench.push_plain(3)
    bench.push(make_sample("g0", group_id="g", group_size=2))
    bench.perform(bench.core.end_stream(bench.now, "p"))
    assert bench.triggers == [Trigger.FLUSH]
    assert bench.dropped(DropReason.INCOMPLETE_GROUP) == 1
    bench.train(0)
    assert bench.log[-1] == Drained("done")
    assert [effect.dp_ranks for effect in bench.log if isinstance(effect, EndRanks)] == [(0, 1)]
    assert bench.push(make_sample("late")) == (Outcome.REFUSED,)
    assert bench.core.statistics().balanced


def test_a_last_partial_batch_may_be_dropped_instead() -> None:
    bench = Bench(batch=4, window=6, capacity=8, flush_partial=False)
    bench.join()
    bench.push_plain(7)
    bench.perform(bench.core.end_stream(bench.now, "p"))
    bench.train(0)
    assert bench.dropped(DropReason.LAST_BATCH) == 3
    assert bench.log[-1] == Drained("done")


def test_draining_with_no_ranks_drops_and_counts_what_is_buffered() -> None:
    bench = Bench()
    bench.push_plain(3)
    bench.perform(bench.core.drain(bench.now))
    assert bench.dropped(DropReason.SHUTDOWN) == 3
    assert Drained("drained") in bench.log[-2:], "producers hear of what was dropped with it"
    assert (bench.core.shutdown_drops.samples, bench.core.shutdown_drops.reasons) == (
        3,
        {DropReason.SHUTDOWN: 3},
    )
    assert str(bench.core.shutdown_drops).endswith("(shutdown 3): p/0, p/1, p/2")


def test_the_end_of_the_stream_loses_nothing_that_the_settings_do_not_ask_for() -> None:
    bench = Bench()
    bench.push(make_sample("half", group_id="g", group_size=2))
    bench.perform(bench.core.end_stream(bench.now, "p"))
    assert bench.dropped(DropReason.INCOMPLETE_GROUP) == 1
    bench.perform(bench.core.drain(bench.now))
    assert bench.core.shutdown_drops.samples == 0


def test_ranks_that_join_after_the_end_are_told_so() -> None:
    bench = Bench()
    bench.perform(bench.core.end_stream(bench.now, "p"))
    bench.join()
    ended = [
        rank for effect in bench.log if isinstance(effect, EndRanks) for rank in effect.dp_ranks
    ]
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "not noticed yet"])
def test_a_rank_whose_connection_broke_at_the_end_is_told_of_it_again(noticed: bool) -> None:
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


def test_ranks_are_gone_for_good_only_when_all_have_said_goodbye() -> None:
    bench = Bench()
    bench.join()
    deserted = [bench.core._ledger.generation.deserted]
    for rank, for_good in ((0, True), (1, False)):
        bench.perform(bench.core.leave(rank, f"r{rank}", bench.now, for_good=for_good))
        deserted.append(bench.core._ledger.generation.deserted)
    bench.perform(bench.core.join(RankHello("r1", 1, 2, 1), bench.now))
    bench.perform(bench.core.leave(1, "r1", bench.now, for_good=True))
    deserted.append(bench.core._ledger.generation.deserted)
    assert deserted == [False, False, False, True]


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


def test_facts_leave_once_and_with_the_totals_that_they_make() -> None:
    bench = Bench(durable=True)
    pushed = bench.core.push(Push("p", 0, (make_sample("s"),)), bench.now)
    assert [type(fact) for fact in pushed.facts] == [SchemaFixed, Accepted]
    others = dict.fromkeys(("duplicate", "conflict", "refused", "full"), 0)
    assert pushed.totals["received"] == {"accepted": 1} | others
    after = bench.core.tick(bench.now)
    assert (after.facts, after.totals) == ((), {})


def test_a_core_whose_facts_nobody_keeps_notes_none() -> None:
    bench = Bench()
    bench.join()
    bench.push_plain(6)
    bench.train(0)
    assert bench.core.statistics().samples_committed == 4
    assert bench.facts == []
