"""How much memory there is for this process: what defaults that are shares of it start from.

The least of what the machine has and of what the control groups that it runs in may use. Invariant:
a file that is absent or unreadable limits nothing, as in containers that show part of the tree.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

#: Where a control group's limit stands: of version 2 (no controller is named), and of version 1.
_FILES = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes of memory, swap not counted. root: where /proc and /sys are, for tests."""
    return min(_machine(root / "proc/meminfo"), *_groups(root))


def _machine(meminfo: Path) -> int:
    with suppress(OSError):
        if found := re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(root: Path) -> Iterator[int]:
    """Limits of the groups of this process, from its own to the root, as far as there are any."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in {"", "memory"} & set(controllers.split(",")):
            folder, file = _FILES[controller]
            group = PurePosixPath(path.lstrip("/"))
            for above in (group, *group.parents):
                yield from _limit(root / "sys/fs/cgroup" / folder / above / file)
    yield 2**63  # no group, no limit


def _limit(file: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):  # `max` is no number
        yield int(file.read_text())
