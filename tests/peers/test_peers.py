"""Claims about the comparison itself: what it loads, how it rates, and what its rows say."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rollout_planner import Quadratic, tokens
from rollout_planner.tuning import BEGIN_MICRO_STEP
from rollout_planner.types import Layout, Sync
from tests.peers import random_cases, table
from tests.peers.adapters import textbook
from tests.peers.corners import Case, all_cases
from tests.peers.loading import UNPACKED, load
from tests.peers.measure import measure, ratio, with_memory_of
from tests.peers.ours import ours, solve
from tests.peers.problem import Corner, Figure, Peer, Problem, Schedule, Unanswered, rate
from tests.peers.roster import FROM_INDEX, FROM_SOURCES, SOURCES, Adapter

LENGTHS = np.array([100, 20, 20, 20, 20, 10, 5, 5])
GROUPS = np.repeat(np.arange(4), 2)
ASKED = {
    Corner.PADDED: Problem(LENGTHS, 2, layout=Layout.PADDED, micro_batches=2),
    Corner.BUDGET: Problem(LENGTHS, 2, micro_batch_tokens=128),
    Corner.GROUPS: Problem(LENGTHS, 2, sync=Sync.STEP, group=GROUPS),
    Corner.EQUAL: Problem(LENGTHS, 2, sync=Sync.STEP),
    Corner.COUNT: Problem(LENGTHS, 2, micro_batch_tokens=128),
    Corner.MULTIPLE: Problem(LENGTHS, 2, micro_batch_tokens=128, multiple=2),
    Corner.MINIMUM: Problem(LENGTHS, 2, micro_batch_tokens=128, minimum=3),
    Corner.TOGETHER: Problem(LENGTHS, 2, micro_batch_tokens=128, group=GROUPS, together=True),
    Corner.TIME: Problem(LENGTHS, 2, micro_batch_tokens=128),
}
#: Where to get those that are not installed.
REMEDY = {
    "index": "make build/bench/peers/.unpacked",
    "sources": "clone it into build/bench/sources",
}


def answered(peer: Peer | None, name: str, remedy: str) -> None:
    """Every function of a peer answers, with each sample once, on as many ranks as there are."""
    if peer is None:
        pytest.skip(f"{name} is not here: {REMEDY[remedy]}")
    for corner, function in peer.solves.items():
        found = rate(ASKED[corner], function(ASKED[corner]))
        assert found.time >= 0.999, corner
        assert found.over_cap == 0, corner


@pytest.mark.parametrize("adapter", FROM_INDEX, ids=lambda adapter: adapter.__module__[20:])
def test_a_peer_of_the_package_index_answers_what_it_has_a_function_for(adapter: Adapter) -> None:
    answered(adapter(UNPACKED), adapter.__module__, "index")


@pytest.mark.parametrize("name", FROM_SOURCES)
def test_a_cloned_peer_answers_what_it_has_a_function_for(name: str) -> None:
    answered(FROM_SOURCES[name](SOURCES / name), name, "sources")


def test_textbook_packing_needs_no_more_bins_than_it_should() -> None:
    lengths = [6, 5, 5, 4]
    assert textbook.first_fit(lengths, 10) == [[0, 3], [1, 2]]
    assert textbook.best_fit(lengths, 10) == [[0, 3], [1, 2]]
    tight = np.random.default_rng(3).integers(1, 100, 200).tolist()
    for pack in (textbook.first_fit, textbook.best_fit):
        bins = pack(tight, 100)
        assert sorted(i for part in bins for i in part) == list(range(200))
        assert max(sum(tight[i] for i in part) for part in bins) <= 100


def test_a_step_time_is_over_what_ranks_would_have_in_an_even_share() -> None:
    problem = Problem(np.array([4, 2, 1, 1]), 2, tokens)
    assert rate(problem, [[[0]], [[1, 2, 3]]]).time == 1
    assert rate(problem, [[[0, 1]], [[2, 3]]]).time == 6 / 4
    uneven = rate(problem, [[[0], [1]], [[2, 3]]])
    assert (uneven.time, uneven.micro_batches, uneven.empty) == ((4 + 2) / 4, 2, 1)


def test_where_ranks_meet_once_a_step_only_their_sums_count() -> None:
    problem = Problem(np.array([4, 2, 1, 1]), 2, tokens, sync=Sync.STEP)
    assert rate(problem, [[[0], []], [[1], [2, 3]]]).time == 1


def test_padded_work_is_compared_with_unpadded() -> None:
    problem = Problem(np.array([4, 1]), 1, tokens, layout=Layout.PADDED, micro_batch_tokens=6)
    found = rate(problem, [[[0, 1]]])
    assert (found.time, found.over_cap) == (8 / 5, 1)


def test_a_lone_sample_may_exceed_a_budget_and_a_group_no_rank() -> None:
    assert (
        rate(Problem(LENGTHS, 1, micro_batch_tokens=99), [[[0], [*range(1, 6)], [6, 7]]]).over_cap
        == 0
    )
    with pytest.raises(AssertionError, match="several ranks"):
        rate(Problem(LENGTHS, 2, group=GROUPS), [[[0, 2, 3, 4]], [[1, 5, 6, 7]]])


@pytest.mark.parametrize("schedule", [[[[0]]], [[[0, 1, 1]]], [[[0, 1]], [[]]]])
def test_an_answer_that_loses_or_doubles_a_sample_or_a_rank_is_no_answer(
    schedule: Schedule,
) -> None:
    with pytest.raises(AssertionError):
        rate(Problem(np.array([3, 4]), 1), schedule)


def case_of(corner: Corner, figure: Figure) -> Case:
    return Case("a case", corner, figure, (), lambda: [ASKED[corner]])


def test_a_row_has_our_figure_the_best_peer_s_and_their_ratio() -> None:
    row = measure(case_of(Corner.COUNT, Figure.COUNT), ours(), textbook.peers())
    assert row["case"] == "a case"
    assert (row["ours"], row["peer"], row["ratio"]) == (1, 1, 1)
    assert row["best_peer"] == "first fit decreasing"
    assert row["others"] == {"first fit decreasing": 1, "best fit decreasing": 1}
    assert "a case" in table.line(row)


def refuses(problem: Problem) -> Schedule:
    raise Unanswered("not today")


def test_what_we_refuse_is_null_with_the_reason_and_the_peer_still_stands_there() -> None:
    us = Peer("ours", "", {Corner.COUNT: refuses})
    row = measure(case_of(Corner.COUNT, Figure.COUNT), us, textbook.peers())
    assert (row["ours"], row["ratio"], row["peer"]) == (None, None, 1)
    assert row["why"] == "not today"
    assert "BEHIND" in table.line(row)


def test_a_peer_over_the_budget_is_not_the_best() -> None:
    def heaps(problem: Problem) -> Schedule:
        return [[list(range(8))], [[]]]

    row = measure(
        case_of(Corner.COUNT, Figure.COUNT), ours(), [Peer("p", "", {Corner.COUNT: heaps})]
    )
    assert (row["ours"], row["peer"], row["why"]) == (1, None, "no peer answers")
    assert "over the budget" in row["others"]["p"]


def test_nothing_over_nothing_is_par() -> None:
    assert (ratio(0, 0), ratio(3, 2), ratio(1, 0)) == (1.0, 1.5, None)


def test_padded_we_get_the_memory_that_the_peer_uses() -> None:
    def halves(problem: Problem) -> Schedule:
        return [[[0, 1]], [[2, 3, 4, 5, 6, 7]]]

    peer = Peer("p", "", {Corner.PADDED: halves})
    assert with_memory_of(ASKED[Corner.PADDED], [peer]).micro_batch_tokens == 200
    assert with_memory_of(ASKED[Corner.PADDED], []).micro_batch_tokens == 200


def test_random_cases_count_what_is_over_a_cap_or_needs_more() -> None:
    draw_one = random_cases.DRAWS[1][2]
    rows = random_cases.measure(Corner.BUDGET, draw_one, ours(), textbook.peers(), 5)
    assert [row["peer"] for row in rows] == ["first fit decreasing", "best fit decreasing"]
    for row in rows:
        assert row["cases"] == row["drawn"] == 5
        assert row["ours_over_cap"] == row["more_micro_batches"] == 0
        assert row["p95"] <= row["worst"]
        assert table.random_line({"corner": "count"} | row)


@pytest.mark.parametrize(("name", "corner", "draw_one"), random_cases.DRAWS)
def test_random_problems_are_the_same_again(
    name: str, corner: Corner, draw_one: random_cases.Draw
) -> None:
    first, again = (draw_one(np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(first.lengths, again.lengths)
    assert first.lengths.min() >= 1
    assert len(first.lengths) >= first.dp_size


def test_every_corner_has_a_case() -> None:
    assert {case.corner for case in all_cases()} == set(Corner)
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)


def test_our_own_answers_are_plans() -> None:
    for corner in (Corner.BUDGET, Corner.GROUPS):
        found = rate(ASKED[corner], solve(ASKED[corner]))
        assert found.over_cap == 0


def test_loading_leaves_no_stub_behind(tmp_path: Path) -> None:
    package = tmp_path / "someones_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('too heavy')")
    (package / "light.py").write_text(
        "from someones_package.heavy import Base, decorated\n"
        "import heavy_dependency\n"
        "@decorated\n"
        "def answer():\n"
        "    return 42\n"
        "class Child(Base):\n"
        "    pass\n"
        "if heavy_dependency.is_available():\n"
        "    raise AssertionError\n"
    )
    mine = ModuleType("heavy_dependency")
    sys.modules["heavy_dependency"] = mine
    try:
        stubs = ["someones_package.heavy", "heavy_dependency"]
        found = load(tmp_path, "someones_package.light", stubs)
        assert found.answer() == 42
        assert sys.modules["heavy_dependency"] is mine
        assert not [name for name in sys.modules if name.startswith("someones_package")]
    finally:
        del sys.modules["heavy_dependency"]


def test_a_cost_is_the_problem_s_own() -> None:
    assert Problem(np.array([2]), 1, Quadratic(1, 3)).costs.tolist() == [10]


def test_micro_batches_up_to_what_was_asked_for_are_run_empty() -> None:
    """An answer of three where multiples of two were asked for runs four."""
    problem = Problem(np.array([3, 2, 1]), 1, tokens, multiple=2, micro_batch_tokens=4)
    found = rate(problem, [[[0], [1], [2]]])
    assert (found.micro_batches, found.empty) == (4, 1)


def test_a_padded_micro_batch_more_than_peers_were_told_to_make_has_its_price() -> None:
    lengths = np.array([4, 4, 2, 2])
    asked = Problem(lengths, 1, tokens, layout=Layout.PADDED, micro_batches=1)
    problem = replace(asked, micro_batch_tokens=16)
    one, two = rate(problem, [[[0, 1, 2, 3]]]), rate(problem, [[[0, 1], [2, 3]]])
    assert one.time == pytest.approx(16 / 12)
    assert two.time == pytest.approx((12 + BEGIN_MICRO_STEP * 16) / 12)
