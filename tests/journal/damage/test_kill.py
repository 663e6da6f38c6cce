"""A killed process loses nothing that it had called durable, and brings nothing back twice."""

import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from rollout_dispatcher.journal.journal import Journal
from tests.journal.player import Player
from tests.journal.support import open_journal, plain
from tests.support.source import ROOT


def one_life(directory: Path, sync: str, seed: int, seconds: float) -> int:
    """Let a process journal for about so long, kill it; the last number it called durable."""
    command = [sys.executable, "-m", "tests.journal.damage.victim", str(directory), sync, str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        first = victim.stdout.readline()
        time.sleep(seconds)
        victim.kill()
        told = (first + victim.stdout.read()).split(b"\n")[:-1]
    assert victim.returncode == -9, f"it ended by itself with {victim.returncode}"
    return int(told[-1])


def check(directory: Path, seed: int, told: int) -> int:
    """What is remembered is the seed's story up to some batch, not before `told`."""
    journal, remembered = open_journal(directory)
    try:
        assert isinstance(journal, Journal)
        durable = journal.statistics().durable_lsn
        assert durable >= told
        player = Player(Random(seed))
        for _ in range(durable):
            player.batch()
        assert plain(remembered) == plain(player.model.remembered())
    finally:
        journal.close()
    return durable


@pytest.mark.parametrize(("sync", "seed"), [("off", 1), ("interval:5ms", 2), ("batch", 3)])
def test_nothing_durable_is_lost_over_four_kills(tmp_path: Path, sync: str, seed: int) -> None:
    random = Random(seed)
    reached = []
    for _ in range(4):
        told = one_life(tmp_path / "journal", sync, seed, random.uniform(0.0, 0.4))
        reached.append(check(tmp_path / "journal", seed, told))
    assert reached == sorted(set(reached)), "each life went on from the one before"
