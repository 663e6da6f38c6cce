"""What waits to be written to one connection: buffers in order, none of them joined or copied.

Sans-IO: `head` offers buffers to a gathered write, `sent` says how many bytes went. Invariant:
bytes leave in the order in which they were put, each once, however the writes cut them.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

Buffer = bytes | bytearray | memoryview

#: What is below this size is joined before it is put: to copy it is cheaper than to list it.
JOINED_BYTES = 8 * 1024
#: Buffers that one system call takes on every platform that we know of: IOV_MAX.
MAX_BUFFERS = 1024


class Outbox:
    """Buffers to write; they must not change before they are sent, or copied.

    nbytes: how much that is.
    """

    def __init__(self) -> None:
        self._buffers: deque[Buffer] = deque()
        self.nbytes = 0

    def put(self, buffers: Iterable[Buffer]) -> None:
        """Add buffers of bytes behind those that wait."""
        filled = list(filter(len, buffers))
        self._buffers += filled
        self.nbytes += sum(map(len, filled))

    def head(self) -> list[Buffer]:
        """The buffers to write next, as many as one gathered write takes."""
        return list(islice(self._buffers, MAX_BUFFERS))

    def sent(self, nbytes: int) -> None:
        """Note that the first `nbytes` bytes were written."""
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

    def clear(self) -> None:
        """Forget what waits."""
        self._buffers.clear()
        self.nbytes = 0
