"""Processes are killed, stopped and cut off under load: nothing is lost, doubled or disputed."""

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from tests.chaos.cluster import Settings
from tests.chaos.faults import FAULTS, deck
from tests.chaos.planted import BUGS
from tests.chaos.run import run
from tests.chaos.selftest import TRIALS, is_caught

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SEED = 7


def test_one_fault_of_each_kind_breaks_no_promise(tmp_path: Path) -> None:
    random = Random(SEED)
    faults = list(islice(deck(FAULTS, random), len(FAULTS)))
    result = run(tmp_path / "run", Settings(dp_size=2), faults, random)
    assert result.stalled is None
    assert result.verdict.clean, result.verdict
    assert len(result.recoveries) == len(FAULTS)
    assert result.acknowledged > 0


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    assert is_caught(bug, tmp_path / "run", SEED)


def test_every_planted_bug_has_its_trial() -> None:
    assert TRIALS.keys() == BUGS.keys()
