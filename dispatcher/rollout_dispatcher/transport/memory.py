"""Memory to receive into, and bytes that are copied there."""

from collections.abc import Callable

import numpy as np

#: Gives memory for so many bytes; what is in it is overwritten.
Memory = Callable[[int], memoryview]

_BYTE = np.dtype(np.uint8)  # numpy finds its own type faster than the one it is of


def uninitialised(nbytes: int) -> memoryview:
    """Memory of its own; not zeroed, which would take about as long as to receive into it."""
    return np.empty(nbytes, _BYTE).data


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """As many bytes from one to the other; unlike an assignment this lets other threads run."""
    np.copyto(np.frombuffer(target, _BYTE), np.frombuffer(source, _BYTE))
