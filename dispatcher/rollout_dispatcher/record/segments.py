"""The files of a record: numbered segments of gzipped JSON lines.

    record-000001.jsonl.gz, record-000002.jsonl.gz, ...    the highest number is the newest

The first line of a segment has its run and the meaning of its times, so it can be read alone. Each
write is one gzip member, so after a kill the file is whole up to the last one, for zcat too.
Invariant: files of other names are never changed, and no file is overwritten.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_json

#: The format of the lines, which the package's docstring describes.
FORMAT = 1
_NAME = re.compile(r"record-(\d{6,})\.jsonl\.gz")

Event = Mapping[str, Any]


def segments(directory: Path) -> list[tuple[int, Path]]:
    """Number and path of each segment in a directory, the oldest first. Raises OSError."""
    found = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(name[1]), path) for name, path in found if name)


def create(directory: Path) -> tuple[int, Path, int]:
    """Create the next segment; returns number, path and descriptor. Raises OSError."""
    while True:
        number = max((number for number, _ in segments(directory)), default=0) + 1
        path = directory / f"record-{number:06d}.jsonl.gz"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        try:
            return number, path, os.open(path, flags, 0o640)
        except FileExistsError:  # of another process that records here
            continue


def lines(events: Sequence[Event]) -> bytes:
    """Events as JSON lines."""
    return b"".join(to_json(event) + b"\n" for event in events)  # four times as fast as json's
