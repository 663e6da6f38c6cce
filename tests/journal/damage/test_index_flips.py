"""Damage to the index is told, or the log makes up for it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.journal.damage.flips import Victim, outcome
from tests.support.source import ROOT


def test_flipped_bits_are_told_or_do_no_harm() -> None:
    """In a process of its own, since it might not survive."""
    command = [sys.executable, "-m", "tests.journal.damage.flips", "60", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert outcomes.keys() == {"unharmed", "JournalCorrupt"}


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    return Victim.make(tmp_path_factory.mktemp("victim"))


def test_an_index_without_its_last_snapshot_goes_on_from_the_one_before(
    victim: Victim, tmp_path: Path
) -> None:
    """The last bit of it is of the last snapshot's checksum."""
    directory = shutil.copytree(victim.directory, tmp_path / "j")
    data = bytearray((directory / "index").read_bytes())
    data[victim.end - 1] ^= 1
    (directory / "index").write_bytes(data)
    assert outcome(victim, directory) == "unharmed"


@pytest.mark.parametrize("seed", range(8))
def test_an_index_that_was_cut_off_is_told_or_does_no_harm(
    victim: Victim, tmp_path: Path, seed: int
) -> None:
    directory = shutil.copytree(victim.directory, tmp_path / "j")
    data = (directory / "index").read_bytes()
    (directory / "index").write_bytes(data[: Random(seed).randrange(victim.end)])
    assert outcome(victim, directory) in {"unharmed", "JournalCorrupt"}
