"""What the system says of files, in the journal's words, and what makes names durable."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_dispatcher.errors import JournalError, JournalFull

#: What gives room again, by what the system says when there is none.
NO_ROOM = {
    errno.ENOSPC: "free space on its file system",
    errno.EDQUOT: "free space, or raise the quota of this user",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f; LimitFSIZE= of systemd)",
}


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn what the system says into what it means for the journal."""
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
    """Write a file that is not there yet. Raises OSError if one is.

    A link that stands there, however it came to, is not followed.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(handle)


def open_ours(path: Path, flags: int = 0) -> int:
    """A descriptor to read and write a file of ours, which is no link to another one."""
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
