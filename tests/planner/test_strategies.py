"""Claims about the strategies: a function and a line each, and nobody asks which it is."""

import ast
from dataclasses import replace

import numpy as np
import pytest

from rollout_planner import tokens
from rollout_planner.split.groups import by_neighbours
from rollout_planner.split.parts import Batch, Parts, matrix, time_of
from rollout_planner.strategies import (
    STRATEGIES,
    looks_ahead,
    plain_split,
)
from rollout_planner.types import IntArray, Layout, PlanConfig, Strategy, Sync, step_time
from tests.support.source import ROOT

CONFIG = PlanConfig(dp_size=2, dispatch_batch_size=4, cost=tokens, micro_batch_size=1)
BATCH = Batch.of(np.array([9.0, 1.0, 8.0, 2.0]), np.array([9, 1, 8, 2]))


@pytest.mark.parametrize("name", Strategy)
def test_every_name_has_a_strategy(name: Strategy) -> None:
    parts = STRATEGIES[name](BATCH, CONFIG)
    assert sorted(parts.sequence.tolist()) == [0, 1, 2, 3]
    assert parts.counts.shape == (2, 2)


def test_only_window_takes_others_than_the_oldest() -> None:
    assert [name for name in Strategy if looks_ahead(name)] == [Strategy.WINDOW]
    assert looks_ahead("window")


def test_nobody_asks_which_strategy_it_is() -> None:
    """Else a new one would be more than a function.

    All may be compared to round-robin, and samples are split over ranks by the default alone.
    """
    asked = []
    for path in (ROOT / "dispatcher").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                sides = map(ast.unparse, (node.left, *node.comparators))
                asked += [(path.name, side) for side in sides if side.startswith("Strategy.")]
    assert {side for _, side in asked} <= {"Strategy.ROUND_ROBIN", "Strategy.WINDOW"}, asked


def test_numbers_that_were_fitted_are_in_one_file() -> None:
    """Others in capitals are names for what is no number, or units."""
    elsewhere = []
    planner = ROOT / "dispatcher" / "rollout_planner"
    for path in planner.rglob("*.py"):
        if path.name in {"tuning.py", "cost.py"}:
            continue
        body = ast.parse(path.read_text()).body
        numbers = [one for one in body if isinstance(one, ast.Assign) and _is_number(one.value)]
        elsewhere += [f"{path.name}: {ast.unparse(one)}" for one in numbers]
    assert elsewhere == []


def _is_number(node: ast.expr) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(
        isinstance(one, ast.Constant) and isinstance(one.value, float | int) for one in parts
    )


def test_kk_takes_costs_of_any_size_in_any_order() -> None:
    """Of whole groups the one with the most tokens need not be the dearest."""
    x = np.array([1e17, 1.3e19, 1.2e19, 1.1e19])
    assert sorted(map(tuple, _sets(by_neighbours(x, np.ones(4, dtype=np.int64), 2, 4)))) == [
        (0, 1),
        (2, 3),
    ]


def _sets(labels: IntArray) -> list[list[int]]:
    return [np.flatnonzero(labels == label).tolist() for label in range(2)]


def test_a_plain_split_does_not_keep_groups() -> None:
    grouped = replace(BATCH, group=np.array([0, 0, 1, 1]))
    assert plain_split(grouped, CONFIG).sequence.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize(("sync", "time"), [(Sync.STEP, 10.0), (Sync.MICRO_STEP, 17.0)])
def test_the_time_of_a_step_is_told_by_one_formula(sync: Sync, time: float) -> None:
    parts = Parts(np.array([0, 1, 3, 2]), np.array([[1, 1], [1, 1]]))
    cost = matrix(BATCH, parts, Layout.PACKED)
    assert cost.tolist() == [[9.0, 1.0], [2.0, 8.0]]
    assert step_time(cost, sync) == time
    assert time_of(BATCH, parts, replace(CONFIG, sync=sync)) == time
