"""The files of a record: numbered segments of gzipped JSON lines, written by whoever owns the run.

    record-000001.jsonl.gz, record-000002.jsonl.gz, ...    the highest number is the newest

Each segment begins with a line that says whose it is and what its times mean, so it can be read
without the others. What is written at once is one gzip member, so a file is whole, for zcat too,
up to the last one, wherever a process was killed. Invariant: a file of another name is never
touched, and none is ever written over.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_json

#: Of the lines; the docstring of the package says what is in them.
FORMAT = 1
_NAME = re.compile(r"record-(\d{6,})\.jsonl\.gz")

Event = Mapping[str, Any]


def segments(directory: Path) -> list[tuple[int, Path]]:
    """Number and place of each segment in a directory, the oldest first. Raises OSError."""
    found = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(name[1]), path) for name, path in found if name)


def create(directory: Path) -> tuple[int, Path, int]:
    """Begin the segment after the newest; its number, place and descriptor. Raises OSError."""
    while True:
        number = max((number for number, _ in segments(directory)), default=0) + 1
        path = directory / f"record-{number:06d}.jsonl.gz"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        try:
            return number, path, os.open(path, flags, 0o640)
        except FileExistsError:  # somebody else records here too, and was faster
            continue


def lines(events: Sequence[Event]) -> bytes:
    """Events as they are written, one a line."""
    return b"".join(to_json(event) + b"\n" for event in events)  # four times as fast as json's
