"""File descriptors of this process: which are open, and none to be had."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPEN = Path("/proc/self/fd")


def open_descriptors() -> set[str]:
    """Those that are open, without the one that it takes to look."""
    return {entry.name for entry in _OPEN.iterdir() if os.path.lexists(entry)}


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """As in a process that has as many files open as it may; what is closed may be opened again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
