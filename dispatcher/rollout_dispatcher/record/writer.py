"""Writes a record from its own thread, so the caller never waits for the disk.

Events are collected and written once a second. The oldest segments are deleted when all of them
exceed the budget. Events that cannot be written are lost, counted, and logged once; recording goes
on when the disk works again, after an event with the number of lost ones. Invariant: no error or
hang of the disk reaches the caller; the memory of waiting events is bounded.
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

#: A killed process loses the events of this time at most.
WRITE_EVERY_SECONDS = 1.0
#: Numbers in waiting events, some 100 MB; events beyond that are lost.
MAX_WAITING_NUMBERS = 2_000_000
#: Segments in a budget, so that deleting one costs a small share of the record.
SEGMENTS_A_BUDGET = 16
#: Lines are alike: the fastest level compresses them to a fifth, too.
_LEVEL = 1


class RecordWriter:
    """One process's part of the record in a directory.

    budget: bytes of all segments together, except for an event that is larger than a segment.
    header: values of the first line of each segment. errors: failed writes, and events that did not
    fit in memory. nbytes: of all segments on disk.
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
        self._lock = threading.Lock()  # never held during a write
        self.errors = self.nbytes = 0
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def put(self, event: Event, numbers: int = 1) -> None:
        """Enqueue an event, with about so many numbers in it; it is written within a second."""
        with self._lock:
            if self._numbers + numbers > MAX_WAITING_NUMBERS:
                self.errors += 1
                self._lost += 1
                return
            self._numbers += numbers
            self._waiting.append(event)

    def close(self, timeout: float) -> None:
        """Write the waiting events; returns then, or after `timeout` seconds if the disk hangs."""
        self._over.set()
        self._thread.join(timeout)

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
            # Headers of later segments have changed options, whichever segments are deleted.
            changed = [event["config"] for event in events if event["event"] == "settings"]
            try:
                self._write(events)
            except Exception as error:
                self._failed(events, error)
            for config in changed:
                self._header = {**self._header, "config": {**self._header["config"], **config}}
        self._end_segment()

    def _write(self, events: list[Event]) -> None:
        """Write events, a segment's share at a time, and remove them from the list."""
        if self._file is None:
            self._begin_segment()
        while events:
            if self._file is None:
                self._begin_segment()
            parts: list[bytes] = []
            nbytes = 0
            while len(parts) < len(events) and (nbytes < self._share or not parts):
                parts.append(lines([events[len(parts)]]))
                nbytes += len(parts[-1])
            self._append(b"".join(parts))
            del events[: len(parts)]
            if self._size > self._share:
                self._end_segment()
            if self._is_failing:
                self._is_failing = False
                text = "the run is recorded again in %s"
                log.info(text, self._directory, extra={"event": "record-recovered"})

    def _begin_segment(self) -> None:
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._delete_oldest()
        number, path, self._file = create(self._directory)
        self._size = 0
        first = {"event": "segment", "format": FORMAT, "number": number, **self._header}
        try:
            self._append(lines([first]))
        except OSError:  # else a full disk would fill with empty segments
            path.unlink(missing_ok=True)
            raise

    def _append(self, text: bytes) -> None:
        """Write lines as one gzip member. Raises OSError; the segment has to end then."""
        assert self._file is not None
        data = memoryview(gzip.compress(text, _LEVEL))
        while data:
            written = os.write(self._file, data)
            self._size += written
            self.nbytes += written
            data = data[written:]

    def _delete_oldest(self) -> None:
        """Make room in the budget for a segment and the write that ends it."""
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
        """Count the error, log the first of a row, and go on in a new segment."""
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
