"""Processes are killed, stopped and cut off under load: nothing is lost, doubled or disputed."""

import subprocess
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.processes import mount
from tests.chaos.faults.decks import BLOCKS, FAULTS, REFERENCES, REWINDS, TORCHRUN_FAULTS, deck
from tests.chaos.planted.bugs import BUGS
from tests.chaos.planted.selftest import SLOW, TRIALS, try_out
from tests.chaos.run import live, run
from tests.chaos.settings import LARGE_BUFFER, Settings

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


def test_trainers_that_go_back_to_a_checkpoint_get_what_came_after_it_once_more(
    tmp_path: Path,
) -> None:
    settings = Settings(dp_size=2, retain=True)
    result = run(tmp_path / "run", settings, REWINDS, Random(SEED))
    assert result.stalled is None
    assert result.verdict.clean, result.verdict
    assert result.steps_rewound > 0


def test_samples_that_ranks_train_together_are_neither_lost_nor_counted_twice(
    tmp_path: Path,
) -> None:
    settings = Settings(dp_size=4, retain=True, max_split=4, references=True)
    result = run(tmp_path / "run", settings, BLOCKS, Random(SEED))
    assert result.stalled is None
    assert result.verdict.clean, result.verdict
    assert result.steps_rewound > 0
    assert len(result.sizes) > 1


def test_ranks_under_torchrun_lose_and_repeat_nothing(tmp_path: Path) -> None:
    random = Random(SEED)
    settings = Settings(dp_size=2, torchrun=True)
    result = run(tmp_path / "run", settings, TORCHRUN_FAULTS, random)
    assert result.stalled is None
    assert result.verdict.clean, result.verdict
    assert len(result.recoveries) == len(TORCHRUN_FAULTS)


def test_a_full_disk_refuses_samples_and_loses_none(tmp_path: Path) -> None:
    place = tmp_path / "probe"
    place.mkdir()
    try:
        mount(place)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing small can be mounted here: {error}")
    subprocess.run(["umount", place], check=True)
    settings = Settings(dp_size=2, small_disk=True, buffer_samples=LARGE_BUFFER)
    faults = ["fill_disk", "kill_dispatcher", "fill_disk"]
    result = run(tmp_path / "run", settings, faults, Random(SEED))
    assert result.stalled is None
    assert result.verdict.clean, result.verdict
    assert result.times_full == 2


def test_payloads_by_reference_are_neither_lost_nor_left(tmp_path: Path) -> None:
    """What may happen to them and their store; the faults of others are in the other runs."""
    names = [name for name in REFERENCES if name not in FAULTS]
    settings = Settings(dp_size=2, references=True)
    result = run(tmp_path / "run", settings, names, Random(SEED))
    assert result.stalled is None
    assert result.verdict.clean, result.verdict
    assert result.released > 0


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in SLOW])
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    result = try_out(bug, tmp_path / "run", SEED)
    assert TRIALS[bug].shows(result.verdict), result


def test_what_brings_bugs_out_breaks_no_promise_without_them(tmp_path: Path) -> None:
    """One after the other in one run."""
    faults = dict.fromkeys(
        trial.fault for trial in TRIALS.values() if not trial.settings.references
    )

    def disturb(cluster: Cluster) -> None:
        for fault in faults:
            cluster.await_steps(1)
            fault(cluster)
            cluster.disturb()
            cluster.await_recovery()
            cluster.look()

    settings = Settings(dp_size=2, retain=True, rank_timeout_s=30.0)
    result = live(tmp_path / "run", settings, disturb)
    assert result.stalled is None
    assert result.verdict.clean, result.verdict


def test_every_planted_bug_has_its_trial() -> None:
    assert TRIALS.keys() == BUGS.keys()
