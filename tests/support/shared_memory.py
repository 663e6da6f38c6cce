"""A dispatcher on this host, and what its segments of shared memory are known by."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.server import ServeProcess

#: What the system calls a segment of ours.
SEGMENT = "memfd:rollout-segment"


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[ServeProcess]:
    """For one DP rank, on a Unix socket and by TCP; nothing is planned before it is there."""
    settings: dict[str, Any] = {
        "listen": [f"unix:{folder}/socket", "127.0.0.1:0"],
        "dp_size": 1,
        "window_multiple": 1,
    }
    with ServeProcess(folder, warm=True, **settings | options) as server:
        yield server
