"""The test of convergence still runs, and does not call what has not learnt anything a success."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convergence.base import first_policy
from tests.convergence.runs import BATCH, Arm, Loop, train
from tests.support.source import ROOT

STEPS = 3


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_in_open_loop_all_that_is_pushed_is_trained_on_whichever_way() -> None:
    first = first_policy(0, 3)
    fifo, window, control = (train(Loop.OPEN, arm, first, 1, STEPS) for arm in Arm)
    assert [run.samples for run in (fifo, window, control)] == [STEPS * BATCH] * 3
    assert [run.steps for run in (fifo, window, control)] == [STEPS] * 3
    assert fifo.tokens == window.tokens > control.tokens
    assert 0 < fifo.reward < 1


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_in_closed_loop_only_a_window_makes_samples_wait() -> None:
    first = first_policy(0, 3)
    fifo, window = (train(Loop.CLOSED, arm, first, 1, STEPS) for arm in (Arm.FIFO, Arm.WINDOW))
    assert fifo.samples == window.samples == STEPS * BATCH
    assert fifo.max_staleness == 0
    assert window.max_staleness >= 1


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_command_writes_its_figures_and_fails_where_nothing_was_learnt(tmp_path: Path) -> None:
    path = tmp_path / "convergence.json"
    words = ["--tasks", "open-loop", "--seeds", "2", "--steps", "2", "--first-steps", "2"]
    command = [sys.executable, "-m", "tests.convergence", *words, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "NOT SHOWN" in done.stdout
    (task,) = json.loads(path.read_text())["tasks"]
    assert task["name"] == "open-loop"
    assert task["seeds"] == 2
    assert task["interval_95"][0] <= task["difference"] <= task["interval_95"][1]
    assert task["positive_control_detected"] in {True, False}
