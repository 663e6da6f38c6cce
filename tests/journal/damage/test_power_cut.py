"""A power cut takes any sectors that were not synced, and the journal opens all the same.

The disk here is the system's calls: what a file held when it was last synced is on it; of each
sector written since, chance decides.
"""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import RLock

import pytest

from rollout_dispatcher.journal.policy import parse_sync
from tests.journal.player import Player
from tests.journal.support import open_journal, opened, plain

SECTOR = 512


class Disk:
    """What of the files in a directory has reached the disk.

    Nothing is synced while it is copied: else the copy may hold a file from before a sync and, of
    another, that it was synced.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced: dict[int, bytes] = {}
        self._stands_still = RLock()
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._syncing(getattr(os, name)))

    def _syncing(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(handle: int) -> None:
            with self._stands_still:
                call(handle)
                status = os.fstat(handle)
                if stat.S_ISREG(status.st_mode):
                    self._synced[status.st_ino] = Path(f"/proc/self/fd/{handle}").read_bytes()

        return sync

    def after_power_cut(self, directory: Path, to: Path, random: Random) -> Path:
        """What would be there if the power went now."""
        with self._stands_still:
            for path, copy in self.after_kill(directory, to):
                content = _torn(self._synced[path.stat().st_ino], copy.read_bytes(), random)
                copy.write_bytes(content)
                self._synced[copy.stat().st_ino] = content
        return to

    def after_kill(self, directory: Path, to: Path) -> list[tuple[Path, Path]]:
        """What would be there if the process was killed now: files of the log and their copies.

        The index says what is in the log, so it is copied first: somebody may go on writing both.
        """
        with self._stands_still:
            shutil.copytree(directory, to)
            names = [
                path.name
                for path in directory.iterdir()
                if path.suffix == ".segment" or path.name == "newest"
            ]
            for name in names:
                shutil.copyfile(directory / name, to / name)
            for name in [*names, "index"]:
                synced = self._synced[(directory / name).stat().st_ino]
                self._synced[(to / name).stat().st_ino] = synced
        return [(directory / name, to / name) for name in [*names, "index"]]


def _torn(before: bytes, after: bytes, random: Random) -> bytes:
    """Each sector as before or as after."""
    assert len(before) == len(after), "its size was not synced"
    share = random.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    found = bytearray(after)
    for at in range(0, len(after), SECTOR):
        if random.random() < share:
            found[at : at + SECTOR] = before[at : at + SECTOR]
    return bytes(found)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("sync", ["off", "interval:5ms", "batch"])
@pytest.mark.parametrize("seed", range(3))
def test_a_power_cut_leaves_a_readable_log_that_is_only_shorter(
    tmp_path: Path, disk: Disk, sync: str, seed: int
) -> None:
    """Lives end by power cuts and kills; each goes on from what the one before left."""
    random = Random(seed)
    directory = tmp_path / "0"
    for life in range(10):
        journal, remembered = open_journal(directory, parse_sync(sync))
        assert journal.close()
        player = Player(Random(seed))
        for _ in range(journal.statistics().durable_lsn):
            player.batch()
        assert plain(remembered) == plain(player.model.remembered())
        told = 0
        with opened(directory, parse_sync(sync)) as (journal, listener, _):
            for _ in range(random.randrange(120)):
                told = journal.append(*player.batch())
            listener.wait(told)
            following = tmp_path / f"{life + 1}"
            if random.random() < 0.7:
                disk.after_power_cut(directory, following, random)
            else:
                disk.after_kill(directory, following)
        directory = following
        if sync == "batch":
            after, _ = open_journal(following, parse_sync(sync))
            assert after.statistics().durable_lsn >= told
            assert after.close()
