"""One segment file: `Segment` appends blocks to it, `Reader` reads any bytes of it.

Invariant: a segment has the size that its header states, or it is damaged.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from rollout_dispatcher.errors import JournalCorrupt, JournalError, JournalFull
from rollout_dispatcher.journal.files.disk import disk_errors
from rollout_dispatcher.journal.files.segment_header import FIRST_BLOCK, MARKS, SegmentHeader

#: Buffers that one system call takes (IOV_MAX of Linux).
_MAX_BUFFERS = 1024


class Segment:
    """An open segment that blocks are appended to. end: offset behind the last one.

    A failed write may be repeated: a block counts once its head is written.
    """

    def __init__(self, path: Path, handle: int, front: SegmentHeader) -> None:
        self.path, self.front = path, front
        self.number, self.size = front.number, front.nbytes
        self.handle = handle
        self.end = FIRST_BLOCK
        self.dirty = False
        self._marks = 0

    def write_ahead(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write bytes that belong behind the next `append`."""
        with disk_errors("write to", self.path):
            for first in range(0, len(buffers), _MAX_BUFFERS):
                offset = self._write_all(list(buffers[first : first + _MAX_BUFFERS]), offset)

    def start_writeback(self, offset: int, nbytes: int) -> None:
        """Start writing these bytes to the disk, as a sync will wait for them anyway.

        Linux does so for bytes that are declared as not needed; elsewhere this is only a hint.
        """
        with suppress(OSError):
            os.posix_fadvise(self.handle, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def append(self, head: memoryview, size: int) -> None:
        """Write at the end, and advance it by `size` bytes, those written ahead included."""
        self.write_ahead(self.end, [head])
        self.end += size
        self.dirty = True

    def _write_all(self, buffers: list[memoryview], offset: int) -> int:
        while buffers:
            written = os.pwritev(self.handle, buffers, offset)
            offset += written
            while buffers and written >= buffers[0].nbytes:
                written -= buffers.pop(0).nbytes
            if written:
                buffers[0] = buffers[0].cast("B")[written:]
        return offset

    def sync(self, sequence: int) -> None:
        """Make all written bytes durable, and mark them as such, up to this sequence.

        The mark itself becomes durable with the next sync at the latest. A failure is final: the
        system may have discarded what it could not write, and a second sync would succeed.
        """
        try:
            os.fdatasync(self.handle)
        except OSError as error:
            raise JournalError(
                f"cannot sync {self.path}: {error.strerror}; what was written since the last sync "
                "may be lost: check the disk, then restart"
            ) from error
        self.dirty = False
        self._marks += 1
        with suppress(JournalFull), disk_errors("write to", self.path):  # recovery works without it
            os.pwrite(self.handle, self.front.mark(sequence), MARKS[self._marks % len(MARKS)])

    @property
    def left(self) -> int:
        """Bytes of blocks that it still takes."""
        return self.size - self.end

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


class Reader:
    """A segment to read from, with a verified header.

    synced: the last sequence that is marked as on the disk.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        with disk_errors("open", path):
            self._handle = os.open(path, os.O_RDONLY)
        try:
            self.front, self.synced = self._open(number)
        except BaseException:
            os.close(self._handle)
            raise

    def _open(self, number: int) -> tuple[SegmentHeader, int]:
        data = self.read(0, FIRST_BLOCK)
        front = SegmentHeader.read(data)
        if front is None or front.number != number:
            raise JournalCorrupt(self.path, 0, "this is not the header of that segment")
        if (size := os.fstat(self._handle).st_size) != front.nbytes:
            raise JournalCorrupt(
                self.path, size, f"it ends there and should have {front.nbytes} bytes"
            )
        synced = front.marked(data)
        if synced is None:
            raise JournalCorrupt(self.path, MARKS[0], "it does not say what of it is on the disk")
        return front, synced

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to `nbytes` from `offset`, fewer only at the end of the file."""
        parts = []
        with disk_errors("read", self.path):
            while nbytes and (part := os.pread(self._handle, nbytes, offset)):
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sync(self) -> None:
        """Make the segment durable."""
        with disk_errors("sync", self.path):
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
