"""The step ledger: release, commit, redelivery, and when a step is wanted."""

import pytest

from rollout_dispatcher.core.effects import FailRanks, Release
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
