"""Memory to receive into, and bytes that are copied there."""

from collections.abc import Callable

import numpy as np

#: Allocates memory of so many bytes; its content is undefined.
Memory = Callable[[int], memoryview]

_BYTE = np.dtype(np.uint8)  # numpy handles its own dtype object faster than a Python type


def uninitialised(nbytes: int) -> memoryview:
    """Fresh memory; not zeroed, which would take about as long as receiving into it."""
    return np.empty(nbytes, _BYTE).data


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between views of equal size; unlike an assignment it releases the GIL."""
    np.copyto(np.frombuffer(target, _BYTE), np.frombuffer(source, _BYTE))
