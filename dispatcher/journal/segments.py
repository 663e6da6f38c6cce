"""Segment files: preallocated, written in order, used again.

    000000000007.segment   header of 64 bytes (magic, format, number), then blocks
    3.spare                preallocated and without content, will be the next segment

Invariants: a segment's number is used once and grows with time; a file is renamed into a segment
only after its header is on the disk, and the directory is synced before anything in it counts;
there is always one spare, so that a full disk is known of while there is still room to write, and
what frees room again (commits) can still be written.
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Self

from dispatcher.errors import JournalCorrupt, JournalError, JournalFull

_HEADER = Struct("<8sIIQ40x")
_MAGIC = b"rdsegmnt"
_FORMAT = 1
#: Where a segment's first block begins.
FIRST_BLOCK = _HEADER.size
#: Spares kept of what was freed; one would do, more save allocations when load comes in bursts.
_MAX_SPARES = 2
#: Buffers that one system call takes (IOV_MAX of Linux).
_MAX_BUFFERS = 1024
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_SEGMENT_NAME = re.compile(r"(\d{12})\.segment")
_SPARE_NAME = re.compile(r"(\d+)\.spare")


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn what the system says into what it means for the journal."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise JournalFull(
                f"no room to {doing} {path} ({error.strerror}); new samples are refused until "
                "there is: free space on its file system"
            ) from error
        raise JournalError(
            f"cannot {doing} {path}: {error.strerror}; check the disk, then restart"
        ) from error


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Segment:
    """An open segment that blocks are appended to.

    After a failure to write the same bytes may be tried again: nothing counts before its head.
    """

    def __init__(self, path: Path, number: int, handle: int, size: int) -> None:
        self.path, self.number, self.size = path, number, size
        self.handle = handle
        self.end = FIRST_BLOCK
        self.dirty = False

    def write_ahead(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write what belongs behind something that `append` is still to bring."""
        with disk_errors("write to", self.path):
            for first in range(0, len(buffers), _MAX_BUFFERS):
                offset = self._write_all(list(buffers[first : first + _MAX_BUFFERS]), offset)

    def hurry(self, offset: int, nbytes: int) -> None:
        """Let the disk begin with these bytes, as a sync will wait for them anyway.

        Linux starts writing back what it is told will not be needed; elsewhere it is only a hint.
        """
        with suppress(OSError):
            os.posix_fadvise(self.handle, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def append(self, head: memoryview, size: int) -> None:
        """Write at the end, and move it on by `size` bytes, what was written ahead included."""
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

    def sync(self) -> None:
        """Make everything written durable.

        A failure is final: the system may have thrown away what it could not write, and a second
        attempt would succeed without it.
        """
        try:
            os.fdatasync(self.handle)
        except OSError as error:
            raise JournalError(
                f"cannot sync {self.path}: {error.strerror}; what was written since the last sync "
                "may be lost: check the disk, then restart"
            ) from error
        self.dirty = False

    def close(self) -> None:
        """Let go of the file; a second time does nothing."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


class Reader:
    """A segment to read from: verified header, then any bytes of it."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        with disk_errors("open", path):
            self._handle = os.open(path, os.O_RDONLY)
        head = os.pread(self._handle, FIRST_BLOCK, 0)
        if head != _header(number):
            os.close(self._handle)
            raise JournalCorrupt(path, 0, "this is not the header of that segment")

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to `nbytes` from `offset`, fewer only at the end of the file."""
        parts = []
        with disk_errors("read", self.path):
            while nbytes and (part := os.pread(self._handle, nbytes, offset)):
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._handle).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.close(self._handle)


class SegmentFiles:
    """The segment files of a journal directory, and its spares."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        #: Size of each segment by number, of the active one too.
        self.sizes: dict[int, int] = {}
        self._spares: dict[Path, int] = {}
        for path in sorted(directory.iterdir()):
            if found := _SEGMENT_NAME.fullmatch(path.name):
                self.sizes[int(found[1])] = path.stat().st_size
            elif _SPARE_NAME.fullmatch(path.name):
                self._adopt(path)

    @property
    def nbytes(self) -> int:
        """Bytes on the disk, spares included."""
        return sum(self.sizes.values()) + sum(self._spares.values())

    def path(self, number: int) -> Path:
        """Where a segment is."""
        return self.directory / f"{number:012d}.segment"

    def reader(self, number: int) -> Reader:
        """Open a segment. Raises JournalCorrupt if it is missing."""
        if number not in self.sizes:
            raise JournalCorrupt(self.path(number), 0, "the file is missing")
        return Reader(self.path(number), number)

    def activate(self, number: int, room: int) -> Segment:
        """Make a spare the next segment, with at least `room` bytes for blocks."""
        need = room + FIRST_BLOCK
        spare = next((path for path, size in self._spares.items() if size >= need), None)
        if spare is None:
            spare = self._allocate(max(need, self.segment_bytes))
        path, size = self.path(number), self._spares[spare]
        with disk_errors("begin", path):
            handle = os.open(spare, os.O_RDWR)
            try:
                os.pwrite(handle, _header(number), 0)
                os.fsync(handle)
                spare.rename(path)
                sync_directory(self.directory)
            except OSError:
                os.close(handle)
                raise
        del self._spares[spare]
        self.sizes[number] = size
        return Segment(path, number, handle, size)

    def ensure_spare(self) -> None:
        """Have room for one more segment. Raises JournalFull."""
        if not any(size >= self.segment_bytes for size in self._spares.values()):
            self._allocate(self.segment_bytes)

    def free(self, number: int) -> None:
        """Nothing in this segment is needed any more: make it a spare, or delete it."""
        path, size = self.path(number), self.sizes[number]
        with disk_errors("free", path):
            if size == self.segment_bytes and len(self._spares) < _MAX_SPARES:
                spare = self._unused_name()
                path.rename(spare)
                self._spares[spare] = size
            else:
                path.unlink()
        del self.sizes[number]

    def _adopt(self, path: Path) -> None:
        """A spare of an earlier run, unless its allocation was cut short or sizes have changed."""
        if path.stat().st_size == self.segment_bytes:
            self._spares[path] = self.segment_bytes
        else:
            path.unlink()

    def _allocate(self, size: int) -> Path:
        path = self._unused_name()
        try:
            with disk_errors("allocate", path):
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                try:
                    os.posix_fallocate(handle, 0, size)
                finally:
                    os.close(handle)
        except JournalError:
            with suppress(OSError):
                path.unlink()
            raise
        self._spares[path] = size
        return path

    def _unused_name(self) -> Path:
        names = (self.directory / f"{number}.spare" for number in count())
        return next(path for path in names if path not in self._spares)


def _header(number: int) -> bytes:
    return _HEADER.pack(_MAGIC, _FORMAT, 0, number)
