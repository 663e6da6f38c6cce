"""File descriptors of this process: which are open, and some to pass on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPEN = Path("/proc/self/fd")


def open_descriptors() -> set[str]:
    """Those that are open, without the one that it takes to look."""
    return {entry.name for entry in _OPEN.iterdir() if os.path.lexists(entry)}


@contextmanager
def a_descriptor() -> Iterator[int]:
    """Some open file."""
    descriptor = os.memfd_create("test")
    try:
        yield descriptor
    finally:
        os.close(descriptor)
