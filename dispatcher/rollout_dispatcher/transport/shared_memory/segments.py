"""Segments: payloads in memory that processes of one host share instead of sending its bytes.

    writer   memfd_create, written, sealed --descriptor--> reader   checked, mapped, looked at

A segment is sealed against writing, growing and shrinking, so whoever has passed it on can neither
change what was read nor take it away under a reader (SIGBUS). It is in no file system: it is gone
once nobody has it open or mapped any more, however its users end. Invariants: nothing is mapped
that is not sealed; a mapping lasts exactly as long as something looks at it.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import call
from types import MappingProxyType
from typing import Self

from rollout_dispatcher.errors import SegmentRefused
from rollout_dispatcher.protocol.outbox import MAX_BUFFERS, Buffer, Outbox
from rollout_dispatcher.transport.descriptors.closing import CLOSER
from rollout_dispatcher.transport.memory import uninitialised

#: Whether this system has such memory.
ARE_SUPPORTED = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
#: All that keep a segment as it is.
_SEALS = (
    fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    if ARE_SUPPORTED
    else 0
)
#: Descriptors that a mapping takes: the segment's, and one that Python's mmap keeps for itself.
DESCRIPTORS_EACH = 2
#: Blocks of `st_blocks`.
_BLOCK_BYTES = 512


def write_segment(buffers: Sequence[Buffer]) -> int:
    """A sealed segment with these bytes, end to end; returns its descriptor, which is the caller's.

    Raises OSError where there can be none, for want of descriptors or memory for instance.
    """
    descriptor = os.memfd_create("rollout-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write(descriptor, buffers)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """All of these, as a rule with one system call."""
    written = os.writev(descriptor, buffers[:MAX_BUFFERS])
    if written == sum(map(len, buffers)):
        return
    unwritten = Outbox()
    unwritten.put(buffers)
    unwritten.sent(written)
    while unwritten.nbytes:
        unwritten.sent(os.writev(descriptor, unwritten.head()))


def check_sealed(descriptor: int) -> None:
    """Raise SegmentRefused unless this is a sealed segment, of whatever size.

    Enough for who reads it, and so finds out if there is less than was said.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:  # only files that are nothing but memory have seals
        raise SegmentRefused(f"it is no shared memory ({error.strerror})") from error
    if seals & _SEALS != _SEALS:
        raise SegmentRefused("it is not sealed against writing, growing and shrinking")


def check_segment(descriptor: int, nbytes: int) -> None:
    """Raise SegmentRefused unless this is a sealed segment of so many bytes, all of them there.

    For who maps it.
    """
    check_sealed(descriptor)  # first: any other file's system may never say how large it is
    found = os.fstat(descriptor)
    if found.st_size != nbytes:
        raise SegmentRefused(f"it has {found.st_size} bytes, and {nbytes} were announced")
    if found.st_blocks * _BLOCK_BYTES < nbytes:  # to read a hole takes memory of the reader's
        raise SegmentRefused("it has holes")


#: Of what is none of a segment's spans, or one no more.
_NO_SPAN = (lambda: None), 0


class Segment(mmap.mmap):
    """A segment of somebody else's, mapped for reading until nothing looks at it any more.

    descriptor: to pass it on with, open for as long. What looks at it is a memoryview of it, or a
    part of one, which has it as its `obj`.
    """

    descriptor: int
    #: What it was cut into, as far as it is needed.
    _finds: Sequence[Callable[[], memoryview | None]] = ()
    #: The same by its `id`, and where each begins.
    _spans: "Mapping[int, tuple[Callable[[], memoryview | None], int]]" = MappingProxyType({})

    @classmethod
    def received(cls, descriptor: int, nbytes: int) -> Self:
        """Take over a descriptor that somebody has sent; it is closed if this raises.

        Raises SegmentRefused for what is no sealed segment of so many bytes, or cannot be mapped.
        """
        try:
            check_segment(descriptor, nbytes)
            try:
                # Private: before Linux 6.7 what is sealed against writing cannot be mapped shared.
                found = cls(descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            except (OSError, ValueError) as error:
                raise SegmentRefused(f"it cannot be mapped ({error})") from error
        except BaseException:
            CLOSER.close([descriptor])
            raise
        found.descriptor = descriptor
        return found

    def cut(self, sizes: Sequence[int]) -> list[memoryview]:
        """All of it in spans of these sizes, which last as long as they are needed."""
        whole, stops = memoryview(self), list(accumulate(sizes))
        starts = [0, *stops]
        spans = [whole[start:stop] for start, stop in zip(starts, stops, strict=False)]
        self._finds = list(map(weakref.ref, spans))
        found = zip(self._finds, starts, strict=False)
        self._spans = dict(zip(map(id, spans), found, strict=True))
        return spans

    @property
    def num_spans(self) -> int:
        """How many it was cut into."""
        return len(self._spans)

    @property
    def live_bytes(self) -> int:
        """Bytes of the spans that are still needed."""
        # Of thousands, after each step: in C. What is gone is None, and an empty one has no bytes.
        return sum(map(len, filter(None, map(call, self._finds))))

    def start_of(self, span: memoryview) -> int | None:
        """The byte at which one of its spans begins; None if this is none of them."""
        find, start = self._spans.get(id(span), _NO_SPAN)
        return start if find() is span else None

    def copied(self, span: memoryview) -> memoryview:
        """One of its spans in memory of our own.

        It is read: pages that nobody looks at through the mapping need not be mapped, and unmapped.
        """
        copy = uninitialised(len(span))
        start = self.start_of(span)
        if start is None or os.preadv(self.descriptor, [copy], start) < len(copy):
            copy[:] = span
        return copy

    def __del__(self) -> None:
        if (descriptor := getattr(self, "descriptor", None)) is not None:
            os.close(descriptor)


def segment_of(view: memoryview) -> Segment | None:
    """The segment that these bytes are in, if they are in one."""
    return view.obj if type(view.obj) is Segment else None
