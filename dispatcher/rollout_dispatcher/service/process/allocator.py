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

#: Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


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
