"""Memory for payloads that is used again once nobody looks at it any more.

A megabyte that is fresh from the kernel costs 256 page faults, more than to receive it.

Invariant: a block has one owner at a time, an array that every view of the payload keeps alive: a
memoryview, an array and a tensor all hold on to what they look at. So the block comes back when
the last of them is gone, and no sooner. Of blocks that are back, at most `keep_bytes` are kept.
"""

import threading
import weakref
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.transport.memory import Memory, uninitialised

#: Smaller payloads come from the heap of the C library, which keeps memory of that size by itself.
SMALLEST_BYTES = 128 * 1024
#: About what the training loop lets go of at once, when it commits a step.
KEPT_BYTES = 128 * 2**20


class _Lent(weakref.ref[NDArray[np.uint8]]):
    """A block that somebody has; a `weakref.finalize` takes a microsecond more."""

    __slots__ = ("block",)
    block: memoryview


class MemoryPool:
    """Gives memory, from any thread; what is in it is overwritten."""

    def __init__(self, memory: Memory = uninitialised, keep_bytes: int = KEPT_BYTES) -> None:
        self._memory, self._keep_bytes = memory, keep_bytes
        self._lock = threading.Lock()
        #: Blocks by size; the size that was asked for last is at the end.
        self._kept: OrderedDict[int, list[memoryview]] = OrderedDict()
        self.kept_bytes = 0
        #: What hears of the end of each owner, by its `id`.
        self._lent: dict[int, _Lent] = {}

    def __call__(self, nbytes: int) -> memoryview:
        """Memory for so many bytes, that nobody else has."""
        if nbytes < SMALLEST_BYTES:
            return self._memory(nbytes)
        block = self._take(_rounded(nbytes))
        owner = np.frombuffer(block, np.uint8, nbytes)
        lent = _Lent(owner, self._give_back)
        lent.block = block
        self._lent[id(lent)] = lent
        return owner.data

    def _take(self, size: int) -> memoryview:
        with self._lock:
            blocks = self._kept.setdefault(size, [])
            self._kept.move_to_end(size)
            if blocks:
                self.kept_bytes -= size
                return blocks.pop()
        return self._memory(size)

    def _give_back(self, lent: "_Lent") -> None:
        """Called where the last view goes, which may be in the midst of `_take`: never waits."""
        block = self._lent.pop(id(lent)).block
        if not self._lock.acquire(blocking=False):
            return  # then it is freed
        try:
            self._kept.setdefault(len(block), []).append(block)
            self.kept_bytes += len(block)
            while self.kept_bytes > self._keep_bytes:
                self._drop_one()
        finally:
            self._lock.release()

    def _drop_one(self) -> None:
        """Free a block of the size that was not asked for the longest."""
        size, blocks = next((size, blocks) for size, blocks in self._kept.items() if blocks)
        blocks.pop()
        self.kept_bytes -= size


def _rounded(nbytes: int) -> int:
    """At most an eighth more, so that a block fits other payloads of about this size."""
    unit = 1 << nbytes.bit_length() - 4
    return -(-nbytes // unit) * unit
