"""A journal directory has one user, one format and nothing else in it."""

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from rollout_dispatcher.errors import JournalError
from tests.journal.support import accepted, opened, recovered


def test_it_is_created_for_its_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "j"
    recovered(directory)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_second_dispatcher_is_told_the_pid_of_the_first(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "j"),
        pytest.raises(JournalError, match=rf"in use by another dispatcher \(pid {os.getpid()}\)"),
    ):
        recovered(tmp_path / "j")
    recovered(tmp_path / "j")


def test_a_lock_file_that_was_removed_lets_nobody_in(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as (journal, listener, _):
        (tmp_path / "j" / "lock").unlink()
        with pytest.raises(JournalError, match=r"in use by another dispatcher \(pid unknown\)"):
            recovered(tmp_path / "j")
        listener.wait(journal.append([accepted(0)], {}))
    assert [entry.ticket for entry in recovered(tmp_path / "j").entries] == [0]


def test_where_directories_are_not_locked_the_lock_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS says EBADF for a lock on what is not open to be written to."""
    flock = fcntl.flock

    def as_nfs_does(handle: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", as_nfs_does)
    test_a_second_dispatcher_is_told_the_pid_of_the_first(tmp_path)


def test_a_directory_that_was_moved_away_is_not_written_beside(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as (journal, listener, _):
        (tmp_path / "j").rename(tmp_path / "moved")
        recovered(tmp_path / "j")  # another dispatcher begins there
        before = {path.name: path.read_bytes() for path in (tmp_path / "j").iterdir()}
        tickets = iter(range(10_000))
        with contextlib.suppress(JournalError):
            while not journal.broken:  # until a segment is full
                journal.append([accepted(next(tickets), tokens=100)], {})
        assert "moved or removed" in str(listener.wait_broken())
        assert {path.name: path.read_bytes() for path in (tmp_path / "j").iterdir()} == before


@pytest.mark.parametrize("number", [3, 5])
def test_another_format_is_left_alone(tmp_path: Path, number: int) -> None:
    recovered(tmp_path / "j")
    (tmp_path / "j" / "format").write_text(f"rollout-dispatcher journal, format {number}\n")
    before = sorted(path.name for path in (tmp_path / "j").iterdir())
    with pytest.raises(
        JournalError, match=rf"has format {number}, .* format 4 alone; finish or drain"
    ):
        recovered(tmp_path / "j")
    assert sorted(path.name for path in (tmp_path / "j").iterdir()) == before


@pytest.mark.parametrize("name", ["notes.txt", "format"])
def test_a_directory_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(JournalError, match="give --journal-dir a directory of its own"):
        recovered(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot use the journal directory"):
        recovered(tmp_path / "file" / "j")


def test_a_failed_opening_holds_no_lock(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(JournalError, match="full at"):
            recovered(tmp_path / "j", map_bytes=512)
    recovered(tmp_path / "j")


@pytest.mark.parametrize(
    "name", ["lock", "format.new", "newest.new", "index", "index.spare", "0.spare"]
)
def test_a_link_that_somebody_has_planted_is_not_written_through(tmp_path: Path, name: str) -> None:
    directory, victim = tmp_path / "j", tmp_path / "victim"
    directory.mkdir()
    victim.write_text("precious")
    if name in {"index", "index.spare", "0.spare"}:  # a journal that has begun
        recovered(directory)
        (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(victim)
    with contextlib.suppress(JournalError):
        recovered(directory)
    assert victim.read_text() == "precious"
    assert victim.is_file()
