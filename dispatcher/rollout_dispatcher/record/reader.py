"""Reads a record as it was written, event by event, and whatever was cut off up to the cut.

Invariant: what is damaged costs what is behind it in its segment, and a note that says so; nothing
that is not a record passes for one.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.record.segments import FORMAT, Event, segments

#: How much of a segment is in memory at a time, as it is compressed.
_CHUNK = 1 << 18
#: Longer lines are no record; the longest there are have a step's samples.
_MAX_LINE = 1 << 28


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a segment: whose it is.

    process: an id for the process that wrote it. unix: the time of day, in seconds since 1970, of
    the zero that `at` counts from. config: the options of `serve`, as JSON has them.
    """

    run: str
    process: str
    release: str
    unix: float
    config: Mapping[str, Any]


class Reader:
    """The events of a directory. notes: what could not be read, once `events` has been through.

    progress: told the share of the bytes that is read, again and again.
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
        """Every event with its segment's header, in the order in which they were written."""
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
        """Whole lines; one that is cut off is none."""
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
        """What gzip members hold, one after the other, up to where the file ends or is damaged."""
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
    """Raises ConfigError for another format, and others for what is no header."""
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
