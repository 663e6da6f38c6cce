"""Segment files: preallocated, written in order, reused; small at first, then doubled in size.

    000000000007.segment   its header, then blocks
    3.spare                preallocated and without content, the next segment

Invariants: segment numbers ascend and are used once; a spare is renamed to a segment only after its
header is on the disk, and the directory is synced before a block in it counts.
"""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from rollout_dispatcher.errors import JournalCorrupt, JournalError, JournalFull
from rollout_dispatcher.journal.files.disk import disk_errors, open_ours, sync_directory
from rollout_dispatcher.journal.files.segment import Reader, Segment
from rollout_dispatcher.journal.files.segment_header import FIRST_BLOCK, SegmentHeader

#: Required spares: one for new samples, and one that these never use.
SPARES = 2
#: Spares kept of freed segments; one more than required saves allocations in bursts.
_MAX_SPARES = SPARES + 1
#: Size of the first segments; each full one doubles the next, up to the full size. A journal with
#: little load takes little disk, a busy one reaches the full size within seconds.
FIRST_BYTES = 4 << 20
#: Segments grow while the disk has this many of the larger ones free: spares, the active one, the
#: index's reserve, and as much again, so that growth alone never fills a disk.
ROOM_TO_GROW = 6
_SEGMENT_NAME = re.compile(r"(\d{12})\.segment")
_SPARE_NAME = re.compile(r"(\d+)\.spare")


class SegmentFiles:
    """The segment files of a journal directory, and its spares.

    segment_bytes: the full size. next_bytes: the present size of new segments.
    """

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.next_bytes = min(FIRST_BYTES, segment_bytes)
        #: Size of each segment by number, with the active one.
        self.sizes: dict[int, int] = {}
        #: Segments with unreadable payloads, which are not compacted.
        self.damaged: set[int] = set()
        self._spares: dict[Path, int] = {}
        for path in sorted(directory.iterdir()):
            if found := _SEGMENT_NAME.fullmatch(path.name):
                self.sizes[int(found[1])] = path.stat().st_size
            elif _SPARE_NAME.fullmatch(path.name):
                self._adopt(path)
        largest = max((*self.sizes.values(), *self._spares.values()), default=0)
        self.next_bytes = max(
            (size for size in self._usual_sizes() if size <= largest), default=self.next_bytes
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the disk, spares included."""
        return sum(self.sizes.values()) + sum(self._spares.values())

    def path(self, number: int) -> Path:
        """The file of a segment."""
        return self.directory / f"{number:012d}.segment"

    def reader(self, number: int) -> Reader:
        """Open a segment. Raises JournalCorrupt if it is missing."""
        if number not in self.sizes:
            raise JournalCorrupt(self.path(number), 0, "the file is missing")
        return Reader(self.path(number), number)

    def activate(self, number: int, capacity: int, after: int) -> Segment:
        """Turn the largest spare into the next segment, with at least `capacity` bytes for blocks.

        after: the last sequence before it, which is on the disk.
        """
        need = capacity + FIRST_BLOCK
        spare = max(self._spares, key=self._spares.__getitem__, default=None)
        if spare is None or self._spares[spare] < need:
            spare = self._allocate(self._size_for(need))
        path, size = self.path(number), self._spares[spare]
        front = SegmentHeader.new(number, size, after)
        with disk_errors("begin", path):
            handle = open_ours(spare)
            try:
                os.pwrite(handle, front.pack(), 0)
                os.fsync(handle)
                spare.rename(path)
                sync_directory(self.directory)
            except OSError:
                os.close(handle)
                raise
        del self._spares[spare]
        self.sizes[number] = size
        return Segment(path, handle, front)

    @property
    def capacity(self) -> int:
        """Bytes for blocks of the next segment if a spare is left behind it; else 0."""
        return max(self._spares.values()) - FIRST_BLOCK if len(self._spares) >= SPARES else 0

    def has_for_another(self) -> bool:
        """Whether there is a spare beyond the required ones; allocates it if the disk has room."""
        with suppress(JournalFull):
            while len(self._spares) <= SPARES:
                self._allocate(self.next_bytes)
        return len(self._spares) > SPARES

    def grow(self) -> None:
        """Double the size of the next segments, if the disk has room for such."""
        larger = min(2 * self.next_bytes, self.segment_bytes)
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY and larger > limit:
            return
        with suppress(OSError):
            disk = os.statvfs(self.directory)
            if disk.f_bavail * disk.f_frsize >= ROOM_TO_GROW * larger:
                self.next_bytes = larger

    def ensure_spares(self, capacity: int = 0) -> None:
        """Have `SPARES`, the largest with `capacity` bytes for blocks. Raises JournalFull.

        Spares smaller than `next_bytes` are replaced, if the disk has room.
        """
        while len(self._spares) < SPARES:
            self._allocate(self.next_bytes)
        with suppress(JournalFull):
            for small in [path for path, size in self._spares.items() if size < self.next_bytes]:
                self._allocate(self.next_bytes)
                with disk_errors("free", small):
                    small.unlink()
                del self._spares[small]
        if self.capacity < capacity:
            self._allocate(self._size_for(capacity + FIRST_BLOCK))

    def _size_for(self, need: int) -> int:
        """The size of a new segment with at least `need` bytes."""
        enough = (size for size in self._usual_sizes() if size >= max(need, self.next_bytes))
        return next(enough, need)

    def resume(self, number: int, offset: int) -> Segment:
        """Reopen a segment to append at this offset; its old blocks become invalid."""
        with self.reader(number) as reader:
            front = reader.front.salted()
        path = self.path(number)
        with disk_errors("go on with", path):
            handle = open_ours(path)
            try:
                os.pwrite(handle, front.header(), 0)
                os.fsync(handle)
            except OSError:
                os.close(handle)
                raise
        segment = Segment(path, handle, front)
        segment.end = offset
        return segment

    def free(self, number: int) -> None:
        """Turn a segment without live data into a spare, or delete it."""
        path, size = self.path(number), self.sizes[number]
        with disk_errors("free", path):
            usual = self.next_bytes <= size <= self.segment_bytes
            if usual and len(self._spares) < _MAX_SPARES:
                spare = self._unused_name()
                path.rename(spare)
                self._spares[spare] = size
            else:
                path.unlink()
        del self.sizes[number]

    def _adopt(self, path: Path) -> None:
        """Take over a spare of an earlier run, unless it has an unusual size."""
        size = path.lstat().st_size
        if size in self._usual_sizes():
            self._spares[path] = size
        else:
            path.unlink()

    def _usual_sizes(self) -> Iterator[int]:
        """Sizes of segments up to the full size."""
        size = min(FIRST_BYTES, self.segment_bytes)
        while size < self.segment_bytes:
            yield size
            size *= 2
        yield self.segment_bytes

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
