"""What was synced and is gone is said, whichever files it was in."""

import shutil
from pathlib import Path

import pytest

from rollout_dispatcher.errors import JournalCorrupt
from rollout_dispatcher.journal.files.segment_header import FIRST_BLOCK
from rollout_dispatcher.journal.policy import SyncPolicy, parse_sync
from tests.journal.support import BATCH, OFF, accepted, as_if_killed, opened, recovered

SAMPLES = 400


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A killed journal of 400 samples, each synced, in several segments."""
    return filled(tmp_path, BATCH)


def filled(folder: Path, sync: SyncPolicy) -> Path:
    with opened(folder / "j", sync) as (journal, listener, _):
        for ticket in range(SAMPLES):
            listener.wait(journal.append([accepted(ticket, tokens=20)], {}))
        return as_if_killed(folder / "j", folder / "killed")


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.segment"))


def test_whole_files_bring_every_sample_back(killed: Path) -> None:
    assert len(recovered(killed).entries) == SAMPLES
    assert len(segments(killed)) > 5


@pytest.mark.parametrize("left", [0, 64, 1000, 4096, 9000, (16 << 10) - 1])
def test_a_last_segment_that_was_cut_is_damage(killed: Path, left: int) -> None:
    last = segments(killed)[-1]
    last.write_bytes(last.read_bytes()[:left])
    before = {path.name: path.read_bytes() for path in killed.glob("*.segment")}
    with pytest.raises(JournalCorrupt, match=last.name):
        recovered(killed)
    assert {path.name: path.read_bytes() for path in killed.glob("*.segment")} == before


def test_a_last_segment_that_was_cut_is_damage_under_every_policy(tmp_path: Path) -> None:
    for text in ("off", "interval:60s"):
        killed = filled(tmp_path / text, parse_sync(text))
        last = segments(killed)[-1]
        last.write_bytes(last.read_bytes()[:9000])
        with pytest.raises(JournalCorrupt, match=rf"{last.name}.*should have 16384 bytes"):
            recovered(killed)


def test_a_last_segment_that_is_missing_is_damage(killed: Path) -> None:
    last = segments(killed)[-1]
    last.unlink()
    with pytest.raises(JournalCorrupt, match=rf"{last.name}.*the file is missing"):
        recovered(killed)


def test_a_last_segment_that_is_missing_after_an_orderly_end_is_damage(tmp_path: Path) -> None:
    filled(tmp_path, OFF)
    last = segments(tmp_path / "j")[-1]
    last.unlink()
    with pytest.raises(JournalCorrupt, match=rf"{last.name}.*the file is missing"):
        recovered(tmp_path / "j")


@pytest.mark.parametrize("number", range(3))
def test_every_segment_with_a_kept_sample_is_looked_for(killed: Path, number: int) -> None:
    segment = segments(killed)[number]
    content = segment.read_bytes()
    segment.unlink()
    with pytest.raises(JournalCorrupt, match=rf"{segment.name}.*the file is missing"):
        recovered(killed)
    segment.write_bytes(content[:-512])
    with pytest.raises(JournalCorrupt, match=rf"{segment.name}.*should have 16384 bytes"):
        recovered(killed)


def test_synced_blocks_that_became_zeros_are_damage(killed: Path) -> None:
    """Of the same size as before, as a file system repaired in haste may leave it."""
    last = segments(killed)[-1]
    content = last.read_bytes()
    last.write_bytes(content[:FIRST_BLOCK] + bytes(len(content) - FIRST_BLOCK))
    assert last.read_bytes() != content
    with pytest.raises(JournalCorrupt, match=r"block \d+ was synced and cannot be read"):
        recovered(killed)


def test_a_missing_name_of_the_newest_segment_is_damage(killed: Path) -> None:
    (killed / "newest").unlink()
    with pytest.raises(JournalCorrupt, match=r"newest.*the file is missing"):
        recovered(killed)


def test_either_record_of_the_newest_segment_will_do(killed: Path, tmp_path: Path) -> None:
    intact = (killed / "newest").read_bytes()
    for at in (8, 512 + 8):
        copy = shutil.copytree(killed, tmp_path / f"copy-{at}")
        content = bytearray(intact)
        content[at] ^= 1
        (copy / "newest").write_bytes(content)
        assert len(recovered(copy).entries) == SAMPLES
    (killed / "newest").write_bytes(bytes(len(intact)))
    with pytest.raises(JournalCorrupt, match="does not say which segment is the newest"):
        recovered(killed)


def test_a_kill_before_the_new_segment_is_named_costs_nothing(tmp_path: Path) -> None:
    """Its file is there, and `newest` still says the one before."""
    with opened(tmp_path / "j", BATCH) as (journal, listener, _):
        listener.wait(journal.append([accepted(0)], {}))
        before = (tmp_path / "j" / "newest").read_bytes()
        listener.wait(journal.append([accepted(1, tokens=2000)], {}))
        active = journal._store.active.number
    assert active == 2
    killed = tmp_path / "killed"
    with opened(tmp_path / "j", BATCH) as (journal, _, found):
        assert len(found.entries) == 2
        as_if_killed(tmp_path / "j", killed)
        assert journal._store.active.number == 3
    assert len(segments(killed)) == 3
    newest = bytearray((killed / "newest").read_bytes())
    newest[512:] = before[512:]
    (killed / "newest").write_bytes(newest)
    assert len(recovered(killed).entries) == 2


def test_either_mark_of_a_segment_will_do_and_without_one_it_is_damage(killed: Path) -> None:
    last = segments(killed)[-1]
    intact = last.read_bytes()
    for at in (512, 1024):
        content = bytearray(intact)
        content[at] ^= 1
        last.write_bytes(content)
        copy = shutil.copytree(killed, killed.with_name(f"copy-{at}"))
        assert len(recovered(copy).entries) == SAMPLES
    last.write_bytes(intact[:512] + bytes(1024) + intact[1536:])
    with pytest.raises(JournalCorrupt, match="does not say what of it is on the disk"):
        recovered(killed)
