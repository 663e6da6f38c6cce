"""Generations: who may join one, and who is fenced."""

import pytest

from rollout_dispatcher.core.steps.generation import Generation
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.errors import ConfigError, GenerationFenced, RankRefused
from tests.support.core.cores import Bench
from tests.support.frozen import frozen


def joined(**options: object) -> Bench:
    """Two ranks are there, and hold a step."""
    bench = Bench(**options)  # type: ignore[arg-type]
    bench.join()
    bench.push_plain(6)
    bench.hungry()
    return bench


def in_pairs_only(dp_size: int) -> None:
    if dp_size % 2:
        raise ConfigError("an odd number")


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (RankHello("r2", 2, 2, 1), "out of range"),
        (RankHello("x", 0, 3, 1), "generation 1 has 2"),
        (RankHello("x", 0, 3, None), "serves 2; start it with --dp-size 3, or with --set"),
        (RankHello("r1", 1, 2, None), "only DP rank 0"),
        (RankHello("impostor", 1, 2, 1), "two processes claim one rank"),
    ],
)
def test_a_rank_that_cannot_be_seated_is_refused_and_nothing_changes(
    hello: RankHello, words: str
) -> None:
    bench = joined()
    before = frozen(bench.core)
    with pytest.raises(RankRefused, match=words):
        bench.core.join(hello, bench.now)
    assert frozen(bench.core) == before


def test_a_number_of_ranks_that_no_step_can_have_is_refused_and_nothing_changes() -> None:
    bench = joined(check_size=in_pairs_only)
    before = frozen(bench.core)
    with pytest.raises(RankRefused, match="no steps for 3 DP ranks: an odd number"):
        bench.core.join(RankHello("x", 0, 3, None), bench.now)
    assert frozen(bench.core) == before


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
    bench = joined()
    bench.perform(bench.core.join(RankHello("new-0", 0, 2, None), bench.now))
    with pytest.raises(GenerationFenced, match=words):
        bench.core.join(RankHello("r1", 1, 2, generation), bench.now)
