"""Errors of the system as errors of the journal, and durable file names."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_dispatcher.errors import JournalError, JournalFull

#: The remedy by errno, where there is no room.
NO_ROOM = {
    errno.ENOSPC: "free space on its file system",
    errno.EDQUOT: "free space, or raise the quota of this user",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f; LimitFSIZE= of systemd)",
}


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn OSError into JournalFull or JournalError, with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise JournalFull(
                f"no room to {doing} {path} ({error.strerror}); new samples are refused until "
                f"there is: {NO_ROOM[error.errno]}"
            ) from error
        raise JournalError(
            f"cannot {doing} {path}: {error.strerror}; check the disk, then restart"
        ) from error


def write_new(path: Path, data: bytes, *, mode: int = 0o600, sync: bool = True) -> None:
    """Write a new file. Raises OSError if it exists; a link is not followed."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(handle)


def open_ours(path: Path, flags: int = 0) -> int:
    """A descriptor to read and write a file. Raises OSError for a link."""
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)


def sync_directory(directory: Path) -> None:
    """Make created and renamed files in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
