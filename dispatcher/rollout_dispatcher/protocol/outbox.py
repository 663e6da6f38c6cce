"""What waits to be written to one connection: buffers in order, none of them joined or copied.

Sans-IO: `head` offers buffers to a gathered write, `sent` says how many bytes went. Descriptors go
with the first byte of the buffers that they were put with (`descriptors`), or with that of earlier
ones that have some and wait too; a write begins with such a byte and ends before the next.
Invariant: bytes leave in the order in which they were put, each once, however the writes cut them;
descriptors likewise.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice

Buffer = bytes | bytearray | memoryview

#: What is below this size is joined before it is put: to copy it is cheaper than to list it.
JOINED_BYTES = 8 * 1024
#: Buffers that one system call takes on every platform that we know of: IOV_MAX.
MAX_BUFFERS = 1024


class Outbox:
    """Buffers to write; they must not change before they are sent, or copied.

    nbytes: how much that is. num_descriptors: that wait with it. together: so many descriptors may
    go along with one byte, though they were put with several.
    """

    def __init__(self) -> None:
        self._buffers: deque[Buffer] = deque()
        #: Descriptors, each lot with the number of bytes, of all that are ever put, before it.
        self._lots: deque[tuple[int, list[int]]] = deque()
        self._gone = 0  # bytes
        self.nbytes = self.num_descriptors = self.together = 0

    def put(self, buffers: Iterable[Buffer], descriptors: Sequence[int] = ()) -> None:
        """Add buffers of bytes behind those that wait, with descriptors that go with the first."""
        if descriptors:
            if self._lots and len(self._lots[-1][1]) + len(descriptors) <= self.together:
                self._lots[-1][1].extend(descriptors)
            else:
                self._lots.append((self._gone + self.nbytes, list(descriptors)))
            self.num_descriptors += len(descriptors)
        filled = list(filter(len, buffers))
        self._buffers += filled
        self.nbytes += sum(map(len, filled))

    def head(self) -> list[Buffer]:
        """The buffers to write next, as many as one gathered write takes."""
        if not self._lots:
            return list(islice(self._buffers, MAX_BUFFERS))
        ahead = [start - self._gone for start, _ in islice(self._lots, 2) if start > self._gone]
        return self._before(ahead[0] if ahead else self.nbytes)

    @property
    def descriptors(self) -> Sequence[int]:
        """Those that go with the next byte."""
        return self._lots[0][1] if self._lots and self._lots[0][0] == self._gone else ()

    def sent(self, nbytes: int) -> Sequence[int]:
        """Note that the first `nbytes` bytes were written; returns the descriptors that went."""
        went = self.descriptors if self._lots and nbytes else ()
        if went:
            self._lots.popleft()
            self.num_descriptors -= len(went)
        self._gone += nbytes
        self._take(nbytes)
        return went

    def _before(self, nbytes: int) -> list[Buffer]:
        """The buffers that the next so many bytes are in, as many as one gathered write takes."""
        found: list[Buffer] = []
        for buffer in islice(self._buffers, MAX_BUFFERS):
            if nbytes <= 0:
                break
            found.append(buffer)
            nbytes -= len(buffer)
        return found

    def _take(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        buffers = self._buffers
        if not self.nbytes:
            buffers.clear()
            return
        while buffers and nbytes >= len(buffers[0]):
            nbytes -= len(buffers.popleft())
        if nbytes:
            buffers[0] = memoryview(buffers[0])[nbytes:]

    def copy(self) -> None:
        """Copy what waits: the memory that was put may change from now on."""
        self._buffers = deque(map(bytes, self._buffers))

    def clear(self) -> list[int]:
        """Forget what waits; returns the descriptors among it."""
        self._buffers.clear()
        left = list(chain.from_iterable(descriptors for _, descriptors in self._lots))
        self._lots.clear()
        self.nbytes = self.num_descriptors = 0
        return left
