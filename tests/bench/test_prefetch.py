"""The benchmark runs, and its rows say what was found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.prefetch import FIRST, SAMPLE_BYTES, Found, Setting, row


@pytest.mark.e2e
def test_what_a_rank_waits_for_is_measured_by_what_it_may_fetch_ahead(tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    words = ["--samples", "4", "--prefetch", "1MiB", "1GiB", "--prefetch-steps", "1"]
    words += ["--compute", "0.2", "--rounds", "1", "--json", str(kept)]
    command = [sys.executable, "-m", "tests.bench.prefetch", *words]
    subprocess.run(command, timeout=200, check=True, capture_output=True)
    without, ahead = json.loads(kept.read_text())["rows"]
    assert [found["prefetch_bytes"] for found in (without, ahead)] == ["1MiB", "1GiB"]
    step = 4 * SAMPLE_BYTES
    for found in (without, ahead):
        assert found["step_bytes"] == step
        assert 0 < found["low_s"] <= found["wait_s"] <= found["high_s"]
    assert without["memory_bytes"] > step
    assert ahead["memory_bytes"] > 2 * step


def test_the_first_steps_do_not_count() -> None:
    runs = [Found([9.0] * FIRST + [0.1, 0.2, 0.3], 5), Found([9.0] * FIRST + [0.2] * 3, 7)]
    found = row(Setting("1GiB", 4, 2), runs)
    assert (found["wait_s"], found["waits"], found["memory_bytes"]) == (0.2, 6, 7)
    assert found["prefetch_steps"] == 2
