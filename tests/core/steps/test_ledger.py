"""What ranks may say of steps: of those that they were given, and while their group may go on."""

import pytest

from rollout_dispatcher.core.effects import FailRanks, Release
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.core.steps.step import StepState
from rollout_dispatcher.errors import GenerationFenced, ProtocolError
from tests.core.ranks.test_generation import in_pairs_only, joined
from tests.support.core.cores import Bench


def prepare(bench: Bench, step: int, *ranks: int) -> None:
    for rank in ranks:
        digest = bench.core._ledger.steps[step].digest
        bench.perform(bench.core.prepared(rank, step, digest, bench.now))


def test_a_rank_cannot_speak_of_a_step_it_was_not_given() -> None:
    bench = joined()
    with pytest.raises(ProtocolError, match="committed step 0 before it was prepared"):
        bench.core.commit(0, 0, bench.now)
    with pytest.raises(ProtocolError, match="took step 0 before it was prepared"):
        bench.core.demand(0, 0, bench.now, hungry=False)
    with pytest.raises(ProtocolError, match="not open"):
        bench.core.prepared(0, 7, "digest", bench.now)


def test_another_digest_fails_the_generation_on_all_ranks() -> None:
    bench = joined()
    prepare(bench, 0, 0)
    (failed,) = bench.core.prepared(1, 0, "another plan", bench.now).effects
    assert isinstance(failed, FailRanks)
    assert failed.client_ids == ("r0", "r1")
    assert "another plan" in str(failed.error)
    assert bench.core._ledger.generation.failed is failed.error
    digest = bench.core._ledger.steps[0].digest
    for rank in (0, 1):
        with pytest.raises(GenerationFenced, match="another plan"):
            bench.core.prepared(rank, 0, digest, bench.now)
        with pytest.raises(GenerationFenced, match="another plan"):
            bench.core.demand(rank, -1, bench.now, hungry=True)
        with pytest.raises(GenerationFenced, match="another plan"):
            bench.core.commit(rank, -1, bench.now)
    with pytest.raises(GenerationFenced):
        bench.core.join(RankHello("r1", 1, 2, 1), bench.now)
    assert bench.core._ledger.steps[0].state is StepState.PLANNED
    assert not bench.core._ledger.hungry
    bench.join()
    bench.hungry()
    prepare(bench, 0, 0, 1)
    assert bench.log[-1] == Release((0, 1), 0)


def test_nobody_can_speak_of_a_step_before_it_is_planned_again() -> None:
    bench = joined(check_size=in_pairs_only, max_open_steps=4)
    prepare(bench, 0, 0, 1)
    digest = bench.core._ledger.steps[0].digest
    bench.core.join(RankHello("new-0", 0, 4, None), bench.now)
    with pytest.raises(ProtocolError, match="not open"):
        bench.core.prepared(0, 0, digest, bench.now)
    with pytest.raises(ProtocolError, match="committed step 0 before it was prepared"):
        bench.core.commit(0, 0, bench.now)
    number = bench.core.generation
    boast = RankHello("new-1", 1, 4, number, taken=0, committed=0, received={0: 1})
    for _ in ("as a stranger", "as one that is known"):
        bench.core.join(boast, bench.now)
        rank = bench.core._ledger.ranks[1]
        assert (rank.taken, rank.prepared, rank.committed) == (-1, -1, -1)
