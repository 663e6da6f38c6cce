"""The benchmark runs, and compares what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.inline_limit import Run, figures
from tests.bench.plane.load.loads import LOADS

PROCESSES = ["all", "producer", "dispatcher", "ranks"]


@pytest.mark.e2e
def test_a_size_is_measured_by_reference_and_inline(tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    words = ["--quick", "--kib", "256", "--pushes", "8", "--pairs", "2"]
    command = [sys.executable, "-m", "tests.bench.inline_limit", *words, "--json", str(kept)]
    done = subprocess.run(command, timeout=200, check=True, capture_output=True, text=True)
    (row,) = json.loads(kept.read_text())
    assert (row["push"], row["kib"]) == (8, 256)
    assert list(row["ratios"]) == list(row["inline_us"]) == PROCESSES
    assert done.stdout.split()[:4] == ["256", "KiB", "by", "8"]
    for way in ("inline_us", "reference_us"):
        each = [row[way][name] for name in PROCESSES[1:]]
        assert min(each) > 0
        assert 0.5 < row[way]["all"] / sum(each) < 2


def test_a_row_says_what_a_reference_costs_over_inline() -> None:
    load = LOADS["1024k-by-8"]
    inline = Run({"all": 3.0, "dispatcher": 2.0}, 4.0)
    reference = Run({"all": 1.5, "dispatcher": 0.5}, 2.0)
    row = figures(load, [(inline, reference)] * 3)
    assert row["ratios"]["all"]["ratio"] == 0.5
    assert row["ratios"]["dispatcher"]["ratio"] == 0.25
    assert row["rate"]["ratio"] == 2
    assert row["inline_us"]["all"] == 3e6 / load.samples
    assert row["reference_us"]["dispatcher"] == 0.5e6 / load.samples


@pytest.mark.parametrize("name", [name for name in LOADS if "-by-" in name])
def test_a_sized_load_has_samples_of_that_size(name: str) -> None:
    load, kib = LOADS[name], int(name.partition("k")[0])
    assert 0 <= load.shape.tokens * load.shape.token_bytes - (kib << 10) < load.shape.token_bytes
    assert load.batch % load.push == 0
