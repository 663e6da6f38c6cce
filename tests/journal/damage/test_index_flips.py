"""Flipped bits of the index are told, or do no harm; they never end the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_dispatcher.errors import JournalCorrupt
from rollout_dispatcher.journal.index.index import Index
from rollout_dispatcher.journal.index.lmdb_check import check_index
from tests.journal.damage.flips import Victim
from tests.support.source import ROOT

PAGE = 4096


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


def damaged(victim: Victim, to: Path, page: int, offset: int, content: bytes) -> Path:
    """The index with something else at a place."""
    data = bytearray((victim.directory / "index").read_bytes())
    data[page * PAGE + offset : page * PAGE + offset + len(content)] = content
    to.write_bytes(data)
    return to


def newest_meta(victim: Victim) -> int:
    """The meta page that counts."""
    data = (victim.directory / "index").read_bytes()
    transactions = [int.from_bytes(data[at * PAGE + 144 :][:8], "little") for at in (0, 1)]
    return transactions.index(max(transactions))


NAMES = (b"values", b"schemas", b"kept", b"steps", b"producers", b"ids", b"groups")


def test_a_sound_index_of_many_pages_passes(victim: Victim) -> None:
    check_index(victim.directory / "index", NAMES)
    assert victim.pages > 40


@pytest.mark.parametrize(
    ("offset", "content", "what"),
    [
        (16, b"\0", "no meta page of LMDB"),
        (20, b"\2", "its format is 2, not 1"),
        (40, b"\1\x10", "pages of 4097 bytes"),
        (136, b"\xff" * 4, "should have"),
        (128, (2**40).to_bytes(8, "little"), "is referred to"),
        (80, b"\1\0\0\0\0\0\0\0", "is referred to"),
        (94, b"\7", "this is page .* of kind"),
        (92, b"\4", "flags 0x4"),
    ],
)
def test_what_a_meta_page_says_is_checked(
    victim: Victim, tmp_path: Path, offset: int, content: bytes, what: str
) -> None:
    path = damaged(victim, tmp_path / "index", newest_meta(victim), offset, content)
    with pytest.raises(JournalCorrupt, match=what):
        check_index(path, NAMES)


def test_an_index_whose_newest_snapshot_does_not_count_goes_on_from_the_one_before(
    victim: Victim, tmp_path: Path
) -> None:
    """The transaction's number is the one thing there that nothing else confirms."""
    path = damaged(victim, tmp_path / "index", newest_meta(victim), 144, bytes(8))
    check_index(path, NAMES)
    Index(path, 1 << 20).close()
