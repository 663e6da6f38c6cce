"""Writes a record from a thread of its own: whoever tells it something never waits for the disk.

Events are collected and written once a second. The oldest segments go when all of them take more
than the budget. What cannot be written is lost, counted and said once; the rest of the run is
recorded as soon as that is possible again, behind a line that says how much is missing. Invariant:
no error of the disk, and no disk that hangs, ever reaches the caller; what waits is bounded.
"""

import contextlib
import gzip
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_dispatcher.record.segments import FORMAT, Event, create, lines, segments

log = logging.getLogger(__name__)

#: How long what happened may be in memory alone, as a process that is killed loses that.
WRITE_EVERY_SECONDS = 1.0
#: Numbers in events that wait to be written; beyond it they are lost. Some 100 MB.
MAX_WAITING_NUMBERS = 2_000_000
#: A budget has so many segments, so that deleting one costs a small share of what is recorded.
SEGMENTS_A_BUDGET = 16
#: Lines differ little: the fastest level makes them a fifth as well.
_LEVEL = 1


class RecordWriter:
    """One process's part of the record in a directory.

    budget: bytes of all segments together, but for an event that is larger than a segment by
    itself. header: what the first line of each segment says. errors: writes that failed, and events
    that found no room in memory. nbytes: on disk, of all segments.
    """

    def __init__(self, directory: Path, budget: int, header: Mapping[str, Any]) -> None:
        self._directory, self._budget, self._header = directory, budget, header
        self._share = budget // SEGMENTS_A_BUDGET
        self._waiting: list[Event] = []
        self._numbers = 0
        self._lost = 0
        self._file: int | None = None
        self._size = 0
        self._is_failing = False
        self._over = threading.Event()
        self._lock = threading.Lock()  # held for an exchange, never while the disk is waited for
        self.errors = self.nbytes = 0
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def put(self, event: Event, numbers: int = 1) -> None:
        """Have an event of about so many numbers written within a second or so."""
        with self._lock:
            if self._numbers + numbers > MAX_WAITING_NUMBERS:
                self.errors += 1
                self._lost += 1
                return
            self._numbers += numbers
            self._waiting.append(event)

    def close(self, patience: float) -> None:
        """Write what waits; return then, or after so many seconds if the disk hangs."""
        self._over.set()
        self._thread.join(patience)

    # -- in the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(WRITE_EVERY_SECONDS)
            with self._lock:
                events, self._waiting, self._numbers = self._waiting, [], 0
                lost, self._lost = self._lost, 0
            if lost:
                events.insert(0, {"event": "lost", "events": lost})
            settings = [event for event in events if event["event"] == "settings"]
            try:
                self._write(events)
            except Exception as error:
                self._failed(events, error)
            self._heed(settings)
        self._end_segment()

    def _heed(self, settings: list[Event]) -> None:
        """Headers of later segments have what has changed, whichever segments are deleted."""
        for event in settings:
            config = {**self._header["config"], **event["config"]}
            self._header = {**self._header, "config": config}

    def _write(self, events: list[Event]) -> None:
        """Write them, a segment's share at a time; what is written leaves the list."""
        if self._file is None:
            self._begin_segment()
        while events:
            if self._file is None:
                self._begin_segment()
            count, data = self._portion(events)
            self._append(data)
            del events[:count]
            if self._size > self._share:
                self._end_segment()
            if self._is_failing:
                self._is_failing = False
                text = "the run is recorded again in %s"
                log.info(text, self._directory, extra={"event": "record-recovered"})

    def _portion(self, events: list[Event]) -> tuple[int, bytes]:
        """How many of the first events go together, and their lines."""
        parts: list[bytes] = []
        nbytes = 0
        for event in events:
            parts.append(lines([event]))
            nbytes += len(parts[-1])
            if nbytes >= self._share:
                break
        return len(parts), b"".join(parts)

    def _begin_segment(self) -> None:
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._delete_oldest()
        number, path, self._file = create(self._directory)
        self._size = 0
        first = {"event": "segment", "format": FORMAT, "number": number, **self._header}
        try:
            self._append(lines([first]))
        except OSError:  # a full disk would soon be full of empty segments too
            path.unlink(missing_ok=True)
            raise

    def _append(self, text: bytes) -> None:
        """Write lines as one gzip member. Raises OSError; the segment is over then."""
        assert self._file is not None
        data = memoryview(gzip.compress(text, _LEVEL))
        while data:
            written = os.write(self._file, data)
            self._size += written
            self.nbytes += written
            data = data[written:]

    def _delete_oldest(self) -> None:
        """Make room within the budget for a segment, and for what ends it."""
        there = [(path, path.stat().st_size) for _, path in segments(self._directory)]
        self.nbytes = sum(size for _, size in there)
        for path, size in there:
            if self.nbytes <= self._budget - 2 * self._share:
                return
            path.unlink(missing_ok=True)
            self.nbytes -= size

    def _end_segment(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _failed(self, events: list[Event], error: Exception) -> None:
        """Count it, say it once, and go on in a new segment."""
        self._end_segment()
        with self._lock:
            self.errors += 1
            self._lost += sum(
                event["events"] if event["event"] == "lost" else 1 for event in events
            )
        if not self._is_failing:
            self._is_failing = True
            log.error(
                "the run cannot be recorded in %s (%s); it goes on without, and is recorded again "
                "when that is possible", self._directory, getattr(error, "strerror", None) or error,
                extra={"event": "record-failing"},
            )  # fmt: skip
