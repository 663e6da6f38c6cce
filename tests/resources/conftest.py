"""What the operating system gives, and what a dispatcher takes of it: tests on real processes.

Each module is one resource: descriptors, memory of connections, places that somebody holds. They
run under small limits (`ServeProcess(open_files=...)`) rather than with large crowds.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.service.conftest import SMALL
from tests.support.server import ServeProcess

Serve = Callable[..., ServeProcess]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve(**options)`: a running dispatcher of two ranks and steps of four samples."""
    with ExitStack() as stack:

        def start(**options: object) -> ServeProcess:
            settings: dict[str, object] = {"warm": True, **SMALL, **options}
            return stack.enter_context(ServeProcess(tmp_path, **settings))  # type: ignore[arg-type]

        yield start


def open_files(server: ServeProcess) -> int:
    """How many files and connections it has open."""
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def resident(server: ServeProcess) -> int:
    """Bytes of memory that it holds."""
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
