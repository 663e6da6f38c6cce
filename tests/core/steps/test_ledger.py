"""The step ledger: release, commit, redelivery, and when a step is wanted."""

import pytest

from rollout_dispatcher.core.effects import Deliver, FailRanks, Redelivered, Release
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.core.steps.step import StepState
from rollout_dispatcher.errors import GenerationFenced, ProtocolError
from tests.support.core.ledgers import (
    begin,
    hello,
    join,
    make_elastic_ledger,
    make_ledger,
    open_step,
    prepare,
)


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


def test_a_rank_that_says_it_committed_before_the_cut_is_believed() -> None:
    ledger = make_ledger()
    open_step(ledger)
    prepare(ledger, 0)
    ledger.commit(0, 0)
    ledger.leave(1, "rank-1")
    effects = join(ledger, hello(1, committed=0, taken=0), 0.0)
    assert effects == []
    assert [done.number for done in ledger.commit(1, ledger.ranks[1].committed)] == [0]


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
