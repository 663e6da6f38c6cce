"""A tree beside itself takes about as long."""

import subprocess
import sys

import pytest


@pytest.mark.e2e
def test_a_tree_plans_about_as_fast_as_it_does() -> None:
    command = [sys.executable, "-m", "tests.bench.beside", ".", "--cell", "tiny", "--pairs", "4"]
    done = subprocess.run(command, timeout=100, check=True, capture_output=True, text=True)
    (row,) = [line.split() for line in done.stdout.splitlines()[1:]]
    assert row[0] == "tiny-64x8-w1.5"
    assert 0.2 < float(row[3]) < 5
