"""Reads a record, event by event; a segment that was cut off up to the cut.

Invariant: damage costs the rest of its segment, and is reported in `notes`; other files are never
taken for a record.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.segments import FORMAT, Event, segments

#: Compressed bytes of a segment in memory at a time.
_CHUNK = 1 << 18
#: A longer line means damage; the longest lines of a record have a step's samples.
_MAX_LINE = 1 << 28


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a segment.

    process: the id of the process that wrote it. unix: the time of `at` = 0, in seconds since 1970.
    config: the options of `serve`, as JSON.
    """

    run: str
    process: str
    release: str
    unix: float
    config: Mapping[str, Any]


class Reader:
    """The events of a directory. notes: on damage, complete at the end of `events`.

    progress: called with the share of the bytes that is read.
    """

    def __init__(
        self, directory: Path, progress: Callable[[float], None] = lambda _share: None
    ) -> None:
        self.notes: list[str] = []
        self._progress, self._bytes = progress, 0
        try:
            self._segments = [path for _, path in segments(directory)]
            self._in_all = sum(path.stat().st_size for path in self._segments)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be read: {error.strerror}") from None
        if not self._segments:
            raise ConfigError(
                f"{directory} holds no record: there is no record-000001.jsonl.gz or the like in "
                "it; name the directory that `dispatcher serve --record-dir` writes to"
            )

    def events(self) -> Iterator[tuple[Header, Event]]:
        """Every event with its segment's header, in the order of writing."""
        for path in self._segments:
            yield from self._segment(path)

    def _segment(self, path: Path) -> Iterator[tuple[Header, Event]]:
        header = None
        for number, line in enumerate(self._lines(path), 1):
            try:
                event = from_json(line)
                if header is None:
                    header = _header(path, event)
                    continue
                if not isinstance(event["event"], str):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                self.notes.append(f"{path.name} is damaged in line {number}; read up to there")
                return
            yield header, event

    def _lines(self, path: Path) -> Iterator[bytes]:
        """Whole lines, without one that is cut off."""
        rest, count = b"", 0
        for data in self._unzipped(path):
            *whole, rest = (rest + data).split(b"\n")
            count += len(whole)
            yield from whole
            if len(rest) > _MAX_LINE:
                break
        if rest:
            self.notes.append(f"{path.name} ends in the middle of line {count + 1}; read up to it")

    def _unzipped(self, path: Path) -> Iterator[bytes]:
        """The content of the gzip members, up to the end of the file or to damage."""
        member = None
        try:
            with path.open("rb") as file:
                while data := file.read(_CHUNK):
                    self._bytes += len(data)
                    self._progress(min(1.0, self._bytes / max(self._in_all, 1)))
                    while data:
                        member = member or zlib.decompressobj(wbits=31)
                        yield member.decompress(data)
                        data = member.unused_data
                        member = None if member.eof else member
        except (OSError, zlib.error) as error:
            why = getattr(error, "strerror", None) or str(error)
            self.notes.append(f"{path.name} cannot be read to its end ({why})")
            return
        if member is not None:
            self.notes.append(f"{path.name} was cut off while it was written; read up to there")


def _header(path: Path, line: Any) -> Header:
    """Raises ConfigError for another format, ValueError and others for a line that is no header."""
    if line["event"] != "segment":
        raise ValueError
    if line["format"] != FORMAT:
        raise ConfigError(
            f"{path} has format {line['format']}, and this release reads format {FORMAT}; take the "
            f"release that wrote it, {line['release']}"
        )
    return Header(
        line["run"], line["process"], line["release"], float(line["unix"]), line["config"]
    )
