"""The demo's figures: each is what its name says, on records small enough to check by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.cli.demo.command import BATCH, STEPS_BETWEEN, Timings, fit, make_load
from rollout_dispatcher.cli.demo.report import summarise, table, verdict
from rollout_planner.cost import parse_cost
from rollout_planner.types import Strategy

METRICS = """\
# TYPE dispatcher_planned_cost counter
dispatcher_planned_cost_total{split="even"} 6
dispatcher_planned_cost_total{split="planned"} 8
"""


def record(**changes: float) -> dict[str, float]:
    return {
        "step": 0, "tokens": 10, "loss_sum": 8.0, "loss_tokens": 8,
        "compute_s": 3.0, "cpu_s": 2.5, "wait_s": 1.0, "reduce_s": 0.0, "data_s": 0.0,
        "step_s": 4.0,
    } | changes  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ranks = [
        [record(), record(step=1, loss_sum=2.0)],
        [
            record(compute_s=1.0, wait_s=3.0),
            record(step=1, compute_s=4.0, wait_s=0.0, loss_sum=2.0),
        ],
    ]
    for number, records in enumerate(ranks):
        text = "".join(json.dumps(item) + "\n" for item in records)
        (tmp_path / f"rank{number}.jsonl").write_text(text)
    (tmp_path / "metrics.txt").write_text(METRICS)
    return tmp_path


def test_the_figures_are_what_they_are_called(run: Path) -> None:
    found = summarise(run)
    assert found["steps"] == 2
    assert found["tokens"] == 40
    assert found["seconds"] == 8.0
    assert found["tokens_per_second"] == 5.0
    assert found["wait_share"] == 5 / 16
    assert found["wait_share_per_rank"] == [2 / 8, 3 / 8]
    assert found["compute_cpu_seconds_per_rank"] == [5.0, 5.0]
    assert found["first_loss"] == 1.0
    assert found["final_loss"] == pytest.approx(20 / 32)
    assert found["lost_planned"] == 0.25


def test_the_table_has_a_column_for_each_strategy(run: Path) -> None:
    results: dict[str, Any] = {"strategies": {"kk": summarise(run), "window": summarise(run)}}
    shown = table(results)
    assert shown.splitlines()[1].split() == ["kk", "window"]
    assert "31.2" in shown
    assert "+0 % tokens/s" in verdict(results)


def test_the_table_of_all_strategies_fits_a_terminal_whatever_the_figures(run: Path) -> None:
    figures = summarise(run) | {"tokens_per_second": 9_999_999.0}
    results: dict[str, Any] = {"strategies": dict.fromkeys(map(str, Strategy), figures)}
    assert max(map(len, table(results).splitlines())) <= 80


def test_the_fit_finds_the_quadratic_that_was_measured() -> None:
    lengths = [64, 256, 1024, 4096]
    found = fit(Timings(lengths, [2e-8 * s * s + 1e-5 * s + 1e-3 for s in lengths]))
    assert (found.a, found.b, found.c) == pytest.approx((2e-8, 1e-5, 1e-3))


def test_no_coefficient_of_the_fit_is_negative() -> None:
    lengths = [64, 256, 1024, 4096]
    found = fit(Timings(lengths, [3e-8 * s * s - 1e-6 * s + 1e-3 for s in lengths]))
    assert min(found.a, found.b, found.c) >= 0
    assert found.a > 0


def test_the_load_is_whole_steps_and_its_cost_can_be_served() -> None:
    lengths = [64, 256, 1024, 4096]
    timings = Timings(lengths, [2e-8 * s * s + 1e-5 * s for s in lengths])
    load = make_load("lineage", 0, 10.0, timings)
    assert len(load.lengths) == load.steps * BATCH
    assert np.mean(load.lengths) == pytest.approx(1000, rel=0.2)
    assert parse_cost(load.cost)(np.array([100]))[0] == pytest.approx(2e-4 + 1e-3, rel=0.01)


@pytest.mark.parametrize(("seconds", "steps"), [(1e-6, STEPS_BETWEEN[0]), (1e9, STEPS_BETWEEN[1])])
def test_the_number_of_steps_is_bounded(seconds: float, steps: int) -> None:
    timings = Timings([64, 1024], [1e-3, 2e-2])
    assert make_load("lineage", 0, seconds, timings).steps == steps
