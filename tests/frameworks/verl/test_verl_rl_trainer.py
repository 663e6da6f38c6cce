"""The block of docs/planner.md for verl's RL trainers, imported by verl as its text says."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.seams import SEAMS, shown

SCRIPT = Path(__file__).with_name("rl_trainers.py")


def test_both_trainers_balance_with_the_block(tmp_path: Path) -> None:
    (tmp_path / "balanced.py").write_text(shown("verl's RL trainer"))
    path = os.pathsep.join(map(str, (tmp_path, SEAMS, os.environ["PYTHONPATH"])))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        env=os.environ | {"PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": "balanced"},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ray"] < 0.02
    assert max(found["sync"]) < 0.5 * min(found["own"])
