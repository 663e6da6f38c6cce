"""Has the C library's allocator keep freed memory for the samples that come next.

glibc gives what is free at the end of its heap back to the kernel, and gets it again page by page,
each zeroed: with samples of 1 MB that is an eighth of the dispatcher's system time or more.
Invariant: of what is free at the end of the heap at most `KEPT_BYTES` stay. Every sample still has
memory of its own.
"""

import ctypes

#: Free memory to keep at the end of the heap: about what is received while a step is committed.
KEPT_BYTES = 128 * 2**20
#: Memory to ask the kernel for at a time; only what is used of it takes up any.
GROWTH_BYTES = 16 * 2**20
#: Larger blocks come from the kernel each by itself; glibc allows no more than this.
LARGEST_ON_HEAP = 32 * 2**20

#: Connections that make a crowd, once half of them have left.
CROWD = 128

#: Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


class Crowd:
    """Gives memory back once a crowd of connections has left."""

    def __init__(self) -> None:
        self._most = self._last = 0

    def check(self, num_connections: int) -> bool:
        """To be told now and then how many there are; returns whether memory was given back."""
        self._most = max(self._most, num_connections)
        before, self._last = self._last, num_connections
        if self._most < CROWD or num_connections > self._most // 2 or num_connections < before:
            return False  # those that have just left may hold some still
        self._most = num_connections
        return give_back()


def keep_freed_memory() -> bool:
    """Set it for this process; returns whether the C library can and did."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library, which does as it does
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    options = {
        _M_TRIM_THRESHOLD: KEPT_BYTES,
        _M_TOP_PAD: GROWTH_BYTES,
        _M_MMAP_THRESHOLD: LARGEST_ON_HEAP,
    }
    return all(mallopt(option, nbytes) == 1 for option, nbytes in options.items())


def give_back() -> bool:
    """Give what is free to the kernel, wherever it lies; returns whether the C library did.

    For when a crowd has left: what it took lies between what stays, and no sample fits in there.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return bool(trim(0))
