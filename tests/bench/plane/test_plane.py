"""The benchmark runs, checks what it moves, and writes what it prints."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.bench.plane.load.check import WHOLE_EVERY, Checker
from tests.bench.plane.load.loads import LOADS, Array, Load, find
from tests.bench.plane.rows import latency_rows, percentile, row, write


@pytest.mark.e2e
def test_a_row_is_measured_beside_its_floor_and_written(tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    command = [sys.executable, "-m", "tests.bench.plane", "--quick", "--rows", "end-to-end-1k"]
    done = subprocess.run(
        [*command, "--json", str(kept)], timeout=100, check=True, capture_output=True, text=True
    )
    rows = json.loads(kept.read_text())
    names = ["raw-relay-1k", "end-to-end-1k"]
    assert [found["name"] for found in rows] == names
    assert [line.split()[0] for line in done.stdout.splitlines()] == names
    relay, ours = rows
    assert ours["against"] == relay["name"]
    assert ours["ratio"] == ours["value"] / relay["value"] > 0


@pytest.mark.e2e
def test_a_tree_costs_about_what_it_costs() -> None:
    command = [sys.executable, "-m", "tests.bench.plane.beside", ".", "--quick", "--pairs", "2"]
    done = subprocess.run(
        [*command, "--load", "hop"], timeout=100, check=True, capture_output=True, text=True
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [name for _, name, *_ in rows] == ["all", "producer", "dispatcher", "ranks"]
    assert all(0.2 < float(ratio) < 5 for _, _, ratio, *_ in rows)


def test_a_load_of_other_sizes_is_found_by_its_order() -> None:
    load = LOADS["26k"].stepping(1024, 256)
    assert (load.batch, load.push, load.samples) == (1024, 256, LOADS["26k"].samples)
    assert find(load.order()) == load


def packed(load: Load, indexes: range) -> tuple[dict[str, Array], Array]:
    """These samples of the pool end to end, and where each starts."""
    samples = [load.fields(index) for index in indexes]
    fields = {name: np.concatenate([it[name] for it in samples]) for name in samples[0]}
    return fields, np.concatenate([[0], np.cumsum(load.lengths[list(indexes)])])


@pytest.mark.parametrize("name", ["26k", "1m"])
def test_what_was_pushed_passes_the_check(name: str) -> None:
    checker = Checker(LOADS[name])
    members = range(3, 9)
    checker.packed(*packed(checker.load, members), [f"s{index}" for index in members])
    ids, seen = checker.take()
    assert ids == [f"s{index}" for index in members]
    assert [at for at, times in enumerate(seen) if times] == list(members)


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("field", ["input_ids", "logprobs", "features"])
def test_a_wrong_word_at_an_end_is_found(field: str, at: int) -> None:
    checker = Checker(LOADS["1m"])
    fields, bounds = packed(checker.load, range(2))
    if (field, at) in {("logprobs", 0), ("features", 0)}:
        at = int(bounds[1]) - 1  # of these the last value of each sample is looked at
    fields[field][at] += 1
    name = "a" if at != -1 else "b"
    checker.packed(fields, bounds, ["a", "b"])
    with pytest.raises(AssertionError, match=f"sample {name} is not what was pushed"):
        checker.take()


@pytest.mark.parametrize("field", ["input_ids", "logprobs", "loss_mask", "features"])
def test_of_some_samples_every_value_is_looked_at(field: str) -> None:
    checker = Checker(LOADS["1m"], ids=["s"] * (WHOLE_EVERY - 1))
    fields, bounds = packed(checker.load, range(1))
    fields[field][101] = 0
    with pytest.raises(AssertionError, match=field):
        checker.packed(fields, bounds, ["a"])


def test_a_swapped_length_is_found() -> None:
    checker = Checker(LOADS["26k"])
    fields, bounds = packed(checker.load, range(2))
    bounds[1] += 1
    checker.packed(fields, bounds, ["a", "b"])
    with pytest.raises(AssertionError):
        checker.take()


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0], 99, 2.0),
        (list(range(1, 201)), 99, 198),
        ([7], 1, 7),
    ],
)
def test_a_percentile_is_one_of_the_values(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == expected


def test_a_row_has_the_median_and_its_ratio() -> None:
    floor = row("floor", "MB/s", [10.0, 30.0, 20.0])
    ours = row("ours", "MB/s", [5.0, 15.0, 4.0], floor)
    assert (floor.value, floor.ratio, ours.value, ours.ratio) == (20.0, None, 5.0, 0.25)
    assert ours.against == "floor"


def test_latencies_are_percentiles_of_all_runs_in_milliseconds(tmp_path: Path) -> None:
    middle, high = latency_rows("hop", [[0.001] * 99, [0.002] * 99 + [0.5]])
    assert (middle.name, middle.unit, middle.runs) == ("hop", "ms p50", [1.0, 2.0])
    assert (high.name, high.unit, high.value) == ("hop", "ms p99", 2.0)
    write(tmp_path / "rows.json", [middle, high])
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert [set(it) for it in kept] == [{"name", "value", "unit", "against", "ratio", "runs"}] * 2
