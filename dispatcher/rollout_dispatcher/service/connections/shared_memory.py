"""Shared memory of producers on this host: their segments, as far as descriptors allow.

A push that comes as a segment is mapped, and its samples are parts of the mapping, so it is freed
whole when the last of them is done (`Stragglers` sees to it that this does not take long).
Invariants: segments take at most `max_descriptors`; what exceeds that is copied, like what would
have been sent, and nothing of it is kept open.
"""

import os
import weakref
from collections.abc import Sequence
from itertools import count

from rollout_dispatcher.errors import SegmentRefused
from rollout_dispatcher.protocol.outbox import MAX_BUFFERS
from rollout_dispatcher.protocol.pieces import Pieces
from rollout_dispatcher.transport.descriptors.closing import CLOSER
from rollout_dispatcher.transport.memory import uninitialised
from rollout_dispatcher.transport.shared_memory.segments import (
    DESCRIPTORS_EACH,
    Segment,
    check_segment,
)


class SharedMemory:
    """The segments that are mapped.

    max_descriptors: that they may take; 0: there are to be none. copied_bytes: of payloads that
    came in segments and are in memory of our own now.
    """

    def __init__(self, max_descriptors: int) -> None:
        self._max_segments = max_descriptors // DESCRIPTORS_EACH
        #: By number, as they come; whichever thread lets go of the last of one takes it out.
        self._segments: dict[int, weakref.ref[Segment]] = {}
        self._numbers = count()
        self.copied_bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether there may be segments."""
        return self._max_segments > 0

    def spans(self, descriptor: int, sizes: Sequence[int]) -> list[memoryview]:
        """What a push consists of: spans of these sizes, end to end in the segment.

        Takes over the descriptor. Raises SegmentRefused for what is no segment of so many bytes.
        """
        nbytes = sum(sizes)
        if len(self._segments) >= self._max_segments:
            self.copied_bytes += nbytes
            return _copied(descriptor, nbytes, sizes)
        segment = Segment.received(descriptor, nbytes)
        number, segments = next(self._numbers), self._segments
        segments[number] = weakref.ref(segment, lambda _: segments.pop(number, None))
        return segment.cut(sizes)

    def segments(self) -> dict[int, Segment]:
        """Those that are mapped, by number, in the order in which they came."""
        found = ((number, find()) for number, find in list(self._segments.items()))
        return {number: segment for number, segment in found if segment is not None}

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped, whether they are still needed or not."""
        return sum(map(len, self.segments().values()))

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def descriptors(self) -> int:
        """How many the segments take."""
        return DESCRIPTORS_EACH * len(self._segments)


def _copied(descriptor: int, nbytes: int, sizes: Sequence[int]) -> list[memoryview]:
    """The same in memory of our own; the descriptor is closed."""
    try:
        check_segment(descriptor, nbytes)
        spans, at = list(map(uninitialised, sizes)), 0
        pieces = Pieces(spans)
        while not pieces.is_full:
            read = os.preadv(descriptor, pieces.missing(MAX_BUFFERS), at)
            pieces.filled(read)
            at += read
    except BaseException as error:
        CLOSER.close([descriptor])
        if isinstance(error, OSError):
            raise SegmentRefused(f"it cannot be read ({error.strerror})") from error
        raise
    os.close(descriptor)
    return spans
