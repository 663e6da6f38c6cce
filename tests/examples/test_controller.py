"""`examples/controller.py`: every phase that its workers generate is trained on, and is learnt."""

import re
from pathlib import Path

import pytest

from tests.examples.run import example, finish

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def test_the_controller_runs_phases_to_their_end_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with example("controller.py", TMPDIR=str(tmp_path)) as process:  # torchrun's logs stay there
        printed = finish(process)
    assert "trained on 192 of 192 samples, all: True" in printed
    versions = [int(found) for found in re.findall(r"^version (\d+):", printed, re.MULTILINE)]
    assert versions == sorted(versions)
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2
