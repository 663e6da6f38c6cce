"""Memory for payloads that is reused once no view of it is left.

A fresh megabyte from the kernel costs 256 page faults, more than receiving it.

Invariant: a block has one owner at a time, an array. Every view of the payload (memoryview, array,
tensor) keeps the owner alive, so the block is returned when the last view is gone, and no sooner.
The pool keeps at most `keep_bytes` of returned blocks.
"""

import threading
import weakref
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.transport.memory import Memory, uninitialised

#: Smaller payloads come from the C library's heap, which reuses memory of that size itself.
SMALLEST_BYTES = 128 * 1024
#: About what the training loop releases at once when it commits a step.
KEPT_BYTES = 128 * 2**20


class _Lent(weakref.ref[NDArray[np.uint8]]):
    """A lent block; a `weakref.finalize` takes a microsecond more."""

    __slots__ = ("block",)
    block: memoryview


class MemoryPool:
    """Allocates memory, from any thread; its content is undefined."""

    def __init__(self, memory: Memory = uninitialised, keep_bytes: int = KEPT_BYTES) -> None:
        self._memory, self._keep_bytes = memory, keep_bytes
        self._lock = threading.Lock()
        #: Free blocks by size, the most recently requested size last.
        self._kept: OrderedDict[int, list[memoryview]] = OrderedDict()
        self.kept_bytes = 0
        #: The weak reference to each owner, by its `id`.
        self._lent: dict[int, _Lent] = {}

    def __call__(self, nbytes: int) -> memoryview:
        """Memory of `nbytes` bytes for exclusive use."""
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
        """Called when the last view is gone, perhaps inside `_take`: never waits."""
        block = self._lent.pop(id(lent)).block
        if not self._lock.acquire(blocking=False):
            return  # the block is freed
        try:
            self._kept.setdefault(len(block), []).append(block)
            self.kept_bytes += len(block)
            while self.kept_bytes > self._keep_bytes:
                self._drop_one()
        finally:
            self._lock.release()

    def _drop_one(self) -> None:
        """Free a block of the least recently requested size."""
        size, blocks = next((size, blocks) for size, blocks in self._kept.items() if blocks)
        blocks.pop()
        self.kept_bytes -= size


def _rounded(nbytes: int) -> int:
    """Round up by at most an eighth, so that a block fits payloads of similar size."""
    unit = 1 << nbytes.bit_length() - 4
    return -(-nbytes // unit) * unit
