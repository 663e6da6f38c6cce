"""The test of convergence still runs, and does not call what has not learnt anything a success."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convergence.answers import CLASSES, LONG, Answers, first_answerer
from tests.convergence.base import first_policy
from tests.convergence.runs import ARMS, BATCH, Arm, Task, train
from tests.support.source import ROOT

STEPS = 3


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_long_answers_are_all_trained_on_whichever_way_and_weigh_what_the_arm_says() -> None:
    runs = {arm: train(Task.LONG, arm, first_answerer(), 7, STEPS) for arm in ARMS[Task.LONG]}
    assert {run.samples for run in runs.values()} == {STEPS * BATCH[Task.LONG]}
    assert {run.steps for run in runs.values()} == {STEPS}
    assert len({run.tokens for run in runs.values()}) == 1
    assert all(run.by_class.keys() == CLASSES.keys() for run in runs.values())
    weight = {arm: run.long_weight or 0.0 for arm, run in runs.items()}
    assert weight[Arm.FIFO] > 0
    assert weight[Arm.CONTROL] < 0.6 * weight[Arm.FIFO]


def test_long_answers_repeat_and_few_are_long() -> None:
    written, again = (Answers(3).write(2000) for _ in range(2))
    ids = "input_ids"
    assert all(
        (one.fields[ids] == other.fields[ids]).all()
        for one, other in zip(written, again, strict=True)
    )
    assert 10 <= sum(one.tokens >= LONG for one in written) <= 30


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_in_closed_loop_only_a_window_makes_samples_wait() -> None:
    first = first_policy(0, 3)
    fifo, window = (train(Task.CLOSED, arm, first, 1, STEPS) for arm in (Arm.FIFO, Arm.WINDOW))
    assert fifo.samples == window.samples == STEPS * BATCH[Task.CLOSED]
    assert fifo.max_staleness == 0
    assert window.max_staleness >= 1


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_command_writes_its_figures_and_fails_where_nothing_was_learnt(tmp_path: Path) -> None:
    path = tmp_path / "convergence.json"
    words = ["--tasks", "long-answers", "--seeds", "2", "--steps", "2", "--first-steps", "2"]
    command = [sys.executable, "-m", "tests.convergence", *words, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "NOT SHOWN" in done.stdout
    (task,) = json.loads(path.read_text())["tasks"]
    assert task["name"] == "long-answers"
    assert task["seeds"] == 2
    for found in task["differences"].values():
        assert found["interval_95"][0] <= found["mean"] <= found["interval_95"][1]
    assert not task["shown"]
