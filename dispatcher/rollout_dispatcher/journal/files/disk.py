"""What the system says of files, in the journal's words, and what makes names durable."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_dispatcher.errors import JournalError, JournalFull

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn what the system says into what it means for the journal."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise JournalFull(
                f"no room to {doing} {path} ({error.strerror}); new samples are refused until "
                "there is: free space on its file system"
            ) from error
        raise JournalError(
            f"cannot {doing} {path}: {error.strerror}; check the disk, then restart"
        ) from error


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
