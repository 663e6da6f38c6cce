"""Generations: who may join one, and who is fenced."""

import pytest

from rollout_dispatcher.core.effects import Release
from rollout_dispatcher.core.steps.generation import Generation
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.errors import GenerationFenced, RankRefused
from tests.support.core.ledgers import (
    hello,
    in_pairs_only,
    join,
    make_elastic_ledger,
    make_ledger,
    prepare,
)


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (hello(2), "out of range"),
        (RankHello("x", 0, 3, 1), "generation 1 has 2"),
        (
            RankHello("x", 0, 3, None),
            "serves 2; start it with --dp-size 3, or with --set",
        ),
        (hello(1, None), "only DP rank 0"),
        (hello(1, client_id="impostor"), "two processes claim one rank"),
    ],
)
def test_a_rank_that_cannot_be_seated_is_refused_and_nothing_changes(
    greeting: RankHello, words: str
) -> None:
    ledger = make_ledger()
    with pytest.raises(RankRefused, match=words):
        join(ledger, greeting, 0.0)
    assert ledger.generation.number == 1
    assert ledger.generation.all_connected
    assert ledger.ranks[1].client_id == "rank-1"


def test_a_number_of_ranks_that_no_step_can_have_is_refused_and_nothing_changes() -> None:
    ledger = make_elastic_ledger()
    with pytest.raises(RankRefused, match="no steps for 3 DP ranks: an odd number"):
        join(ledger, RankHello("x", 0, 3, None), 0.0)
    assert (ledger.generation.number, ledger.generation.dp_size, ledger.unplanned) == (1, 2, None)
    assert ledger.generation.all_connected
    assert prepare(ledger, 1) == [Release((0, 1), 1)]


@pytest.mark.parametrize(("dp_size", "expected"), [(None, 2), (4, 4), (3, 2)])
def test_after_a_restart_the_number_of_ranks_is_that_of_the_last_generation_if_it_still_may_be(
    dp_size: int | None, expected: int
) -> None:
    elastic = Generation(2, in_pairs_only)
    elastic.restore(7, dp_size, None)
    assert (elastic.number, elastic.dp_size) == (7, expected)
    rigid = Generation(2)
    rigid.restore(7, dp_size, None)
    assert (rigid.number, rigid.dp_size) == (7, 2)


@pytest.mark.parametrize(("generation", "words"), [(1, "is over"), (9, "leave out generation=")])
def test_a_rank_of_another_generation_is_fenced(generation: int, words: str) -> None:
    ledger = make_ledger()
    join(ledger, hello(0, None, client_id="new-0"), 0.0)
    with pytest.raises(GenerationFenced, match=words):
        join(ledger, hello(1, generation), 0.0)
