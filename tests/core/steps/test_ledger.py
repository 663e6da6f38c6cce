"""The step ledger: release, commit, redelivery, and when a step is wanted."""

import numpy as np
import pytest

from rollout_dispatcher.core.effects import Deliver, Effect, FailRanks, Redelivered, Release
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.core.steps.step import OpenStep, StepState
from rollout_dispatcher.errors import GenerationFenced, ProtocolError
from rollout_planner.types import Plan, Sync
from tests.support.core.ledgers import (
    begin,
    hello,
    join,
    make_elastic_ledger,
    make_ledger,
    open_step,
    prepare,
)


def test_a_step_goes_to_every_rank_and_is_released_when_all_hold_it() -> None:
    ledger = make_ledger()
    assert open_step(ledger) == [Deliver(0, 0), Deliver(1, 0)]
    assert prepare(ledger, 0, 0) == []
    assert prepare(ledger, 0, 1) == [Release((0, 1), 0)]


def test_a_step_is_committed_when_every_rank_has_said_so() -> None:
    ledger = make_ledger()
    open_step(ledger)
    prepare(ledger, 0)
    assert ledger.commit(0, 0) == []
    assert ledger.steps.in_flight == 2
    (done,) = ledger.commit(1, 0)
    assert (done.number, done.state) == (0, StepState.COMMITTED)
    assert ledger.steps.in_flight == 0


def test_a_commit_covers_all_steps_before_it() -> None:
    ledger = make_ledger()
    for step in range(3):
        open_step(ledger)
        prepare(ledger, step)
    ledger.commit(0, 2)
    assert [done.number for done in ledger.commit(1, 1)] == [0, 1]
    assert list(ledger.steps) == [2]


def test_a_rank_cannot_speak_of_a_step_it_was_not_given() -> None:
    ledger = make_ledger()
    open_step(ledger)
    with pytest.raises(ProtocolError, match="committed step 0 before it was prepared"):
        ledger.commit(0, 0)
    with pytest.raises(ProtocolError, match="took step 0 before it was prepared"):
        ledger.demand(0, 0, hungry=False)


def test_preparing_a_step_that_is_not_open_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="not open"):
        make_ledger().prepared(0, 7, "digest")


def test_another_digest_fails_the_generation_on_all_ranks() -> None:
    ledger = make_ledger()
    open_step(ledger)
    (failed,) = ledger.prepared(1, 0, "another plan")
    assert isinstance(failed, FailRanks)
    assert failed.client_ids == ("rank-0", "rank-1")
    assert "another plan" in str(failed.error)
    assert ledger.generation.failed is failed.error
    with pytest.raises(GenerationFenced):
        join(ledger, hello(1), 0.0)
    join(ledger, hello(0, None, client_id="new-0"), 0.0)
    join(ledger, hello(1, 2, client_id="new-1"), 0.0)
    begin(ledger)
    assert prepare(ledger, 0) == [Release((0, 1), 0)]


def test_no_release_while_a_rank_is_away_and_release_when_it_is_back() -> None:
    ledger = make_ledger()
    open_step(ledger)
    prepare(ledger, 0, 0)
    ledger.leave(0, "rank-0")
    assert prepare(ledger, 0, 1) == []
    assert ledger.steps[0].state is StepState.PREPARED
    join(ledger, hello(0, received={0: 1}), 0.0)
    assert ledger.release_ready() == [Release((0, 1), 0)]


def test_a_live_rank_that_reconnects_goes_on_where_it_was() -> None:
    ledger = make_ledger()
    open_step(ledger)
    open_step(ledger)
    prepare(ledger, 0)
    ledger.leave(1, "rank-1")
    effects = join(ledger, hello(1, received={0: 3}), 0.0)
    assert [effect for effect in effects if isinstance(effect, Deliver)] == [
        Deliver(1, 0, 3),
        Deliver(1, 1, 0),
    ]
    assert Redelivered(0, "reconnect") in effects
    assert prepare(ledger, 0, 1) == [Release((1,), 0)]  # it may have missed the first one


def test_a_rank_that_says_it_committed_before_the_cut_is_believed() -> None:
    ledger = make_ledger()
    open_step(ledger)
    prepare(ledger, 0)
    ledger.commit(0, 0)
    ledger.leave(1, "rank-1")
    effects = join(ledger, hello(1, committed=0, taken=0), 0.0)
    assert effects == []
    assert [done.number for done in ledger.commit(1, ledger.ranks[1].committed)] == [0]


def test_a_new_process_of_the_same_generation_starts_at_the_steps_beginning() -> None:
    ledger = make_ledger()
    open_step(ledger)
    prepare(ledger, 0)
    ledger.leave(1, "rank-1")
    effects = join(ledger, hello(1, client_id="other", received={0: 3}), 0.0)
    assert Deliver(1, 0, 0) in effects


def test_a_new_generation_gets_every_open_step_again_identical_and_acknowledgements_are_void() -> (
    None
):
    ledger = make_ledger()
    open_step(ledger)
    open_step(ledger, "c", "d")
    prepare(ledger, 0)
    ledger.commit(0, 0)
    digests = {number: step.digest for number, step in ledger.steps.items()}
    effects = join(ledger, hello(0, None, client_id="new-0"), 1.0)
    assert isinstance(effects[0], FailRanks)
    assert effects[0].client_ids == ("rank-0", "rank-1")
    assert effects[-2:] == [Deliver(0, 0), Deliver(0, 1)]
    effects = join(ledger, hello(1, 2, client_id="new-1"), 1.0)
    assert effects == [Deliver(1, 0), Deliver(1, 1)]
    assert {number: step.digest for number, step in ledger.steps.items()} == digests
    assert {step.state for step in ledger.steps.values()} == {StepState.PLANNED}
    prepare(ledger, 0)
    assert ledger.commit(1, 0) == []
    assert [done.number for done in ledger.commit(0, 0)] == [0]


def grow(ledger: StepLedger, dp_size: int) -> list[Effect]:
    """A whole process group of another size takes over."""
    effects = join(ledger, RankHello("new-0", 0, dp_size, None), 1.0)
    for dp_rank in range(1, dp_size):
        greeting = RankHello(f"new-{dp_rank}", dp_rank, dp_size, ledger.generation.number)
        effects += join(ledger, greeting, 1.0)
    begin(ledger)
    return effects


def replan(ledger: StepLedger) -> list[Effect]:
    """Plan the first unplanned step again: its samples one by one to the ranks in turn."""
    step = ledger.unplanned
    assert step is not None
    entries = tuple(sorted(step.entries(), key=lambda entry: entry.ticket))
    places, size = np.arange(len(entries)), ledger.generation.dp_size
    parts = [places[rank::size] for rank in range(size)]
    counts = np.array([[len(part)] for part in parts])
    plan = Plan(np.concatenate(parts), counts, np.ones((size, 1)), Sync.STEP, 0, 0, 1)
    return ledger.replan(step.number, plan, entries)


def names(step: OpenStep) -> list[str]:
    return sorted(sample.sample_id for sample in step.samples())


def test_steps_for_another_number_of_ranks_go_out_one_by_one_once_they_are_planned_again() -> None:
    ledger = make_elastic_ledger()
    before = dict(ledger.steps)
    effects = grow(ledger, 4)
    assert Redelivered(0, "new-size") in effects
    assert [effect for effect in effects if isinstance(effect, Deliver)] == []
    assert replan(ledger) == [Deliver(rank, 0) for rank in range(4)]
    late = join(ledger, RankHello("new-3", 3, 4, ledger.generation.number), 2.0)
    assert [effect for effect in late if isinstance(effect, Deliver)] == [Deliver(3, 0)]
    assert replan(ledger) == [Deliver(rank, 1) for rank in range(4)]
    assert ledger.unplanned is None
    for number, step in ledger.steps.items():
        assert (step.dp_size, names(step)) == (4, names(before[number]))
        assert step.digest != before[number].digest
        assert step.planned_at == before[number].planned_at
    assert prepare(ledger, 0, 0, 1, 2) == []
    assert prepare(ledger, 0, 3) == [Release((0, 1, 2, 3), 0)]


def test_nobody_can_speak_of_a_step_before_it_is_planned_again() -> None:
    ledger = make_elastic_ledger()
    digest = ledger.steps[0].digest
    join(ledger, RankHello("new-0", 0, 4, None), 1.0)
    with pytest.raises(ProtocolError, match="not open"):
        ledger.prepared(0, 0, digest)
    with pytest.raises(ProtocolError, match="committed step 0 before it was prepared"):
        ledger.commit(0, 0)
    boast = RankHello(
        "new-1", 1, 4, ledger.generation.number, taken=1, committed=1, received={0: 1, 1: 1}
    )
    for _ in ("as a stranger", "as one that is known"):
        join(ledger, boast, 1.0)
        rank = ledger.ranks[1]
        assert (rank.taken, rank.prepared, rank.committed) == (-1, -1, -1)


def test_steps_that_fit_again_stay_as_they_were_behind_those_that_do_not() -> None:
    ledger = make_elastic_ledger()
    grow(ledger, 4)
    second = ledger.steps[1]
    replan(ledger)
    assert [effect for effect in grow(ledger, 2) if isinstance(effect, Deliver)] == []
    assert replan(ledger) == [Deliver(rank, step) for step in (0, 1) for rank in (0, 1)]
    assert ledger.steps[1] is second


def test_a_step_is_wanted_when_every_rank_has_room_for_one_more() -> None:
    ledger = make_ledger()
    wanted = [ledger.has_room]
    open_step(ledger)
    wanted.append(ledger.has_room)
    prepare(ledger, 0)
    for rank in (0, 1):
        ledger.demand(rank, 0, hungry=False)
        wanted.append(ledger.has_room)
    ledger.leave(1, "rank-1")
    wanted.append(ledger.has_room)
    assert wanted == [True, False, False, True, False]


def test_without_prefetch_a_step_is_wanted_only_by_the_hungry() -> None:
    ledger = StepLedger(2, 4)
    join(ledger, hello(0, None, prefetch_steps=0), 0.0)
    join(ledger, hello(1, prefetch_steps=0), 0.0)
    assert not ledger.has_room
    ledger.demand(0, -1, hungry=True)
    assert ledger.hungry
    assert not ledger.has_room
    ledger.demand(1, -1, hungry=True)
    assert ledger.has_room


def test_no_more_steps_are_open_than_allowed() -> None:
    ledger = make_ledger(max_open_steps=1)
    open_step(ledger)
    prepare(ledger, 0)
    for rank in (0, 1):
        ledger.demand(rank, 0, hungry=True)
    assert not ledger.has_room
    for rank in (0, 1):
        ledger.commit(rank, 0)
    assert ledger.has_room


def test_what_ranks_of_a_failed_generation_say_is_void() -> None:
    ledger = make_ledger()
    open_step(ledger)
    prepare(ledger, 0, 0)
    ledger.prepared(1, 0, "another plan")
    digest = ledger.steps[0].digest
    for dp_rank in (0, 1):
        with pytest.raises(GenerationFenced, match="another plan"):
            ledger.prepared(dp_rank, 0, digest)
        with pytest.raises(GenerationFenced, match="another plan"):
            ledger.demand(dp_rank, -1, hungry=True)
        with pytest.raises(GenerationFenced, match="another plan"):
            ledger.commit(dp_rank, -1)
    assert ledger.steps[0].state is StepState.PLANNED
    assert not ledger.hungry
