"""Claims about the windows that docs/evidence.md shows."""

from pathlib import Path

import pytest

from tests.bench.windows import simulated
from tests.support.traces import write_example_trace

SIZES = ("--dp-size", 4, "--global-batch-size", 32, "--micro-batch-size", 1, "--steps", 2)


def test_what_is_simulated_is_what_the_command_finds(tmp_path: Path) -> None:
    write_example_trace(tmp_path / "trace.csv.gz")
    found = simulated(
        tmp_path / "trace.csv.gz", *SIZES, "--strategy", "window", "--window", 1, 1.25
    )
    assert found.trace.samples == 1200
    assert [(run.strategy, run.window) for run in found.runs] == [("window", 1), ("window", 1.25)]


def test_a_command_that_fails_is_no_result() -> None:
    with pytest.raises(AssertionError, match="ended with 2"):
        simulated("no-such-trace", *SIZES)
