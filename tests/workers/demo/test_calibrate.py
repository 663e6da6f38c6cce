"""The calibration runs by itself, as its docstring says, also where nobody holds its stdin."""

import json
import subprocess
import sys

import pytest

from rollout_workers.demo.calibrate import LENGTHS


@pytest.mark.e2e
def test_it_prints_what_it_measured_without_a_standard_input() -> None:
    command = [sys.executable, "-m", "rollout_workers.demo.calibrate"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=True
    )
    found = json.loads(done.stdout)
    assert found["lengths"] == list(LENGTHS)
    assert len(found["seconds"]) == len(LENGTHS)
    assert min(found["seconds"]) > 0
