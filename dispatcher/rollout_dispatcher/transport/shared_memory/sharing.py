"""Which spans of a micro-batch a DP rank finds in segments, instead of being sent their bytes."""

from collections.abc import Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

from rollout_dispatcher.protocol.assemble import Shared
from rollout_dispatcher.transport.shared_memory.segments import Segment, segment_of

#: Where fewer bytes than this lie in a segment they are sent: to pass a descriptor, and to look at
#: what it is of, takes about as long.
LEAST_BYTES_EACH = 4 * 1024
#: A micro-batch with fewer bytes than this in segments is sent whole, for the same reason.
LEAST_BYTES = 64 * 1024


#: Segments, and the number by which places speak of each: 0, 1, ...
Numbers = Mapping[Segment, int]
_NONE: Numbers = MappingProxyType({})


class Sharing(NamedTuple):
    """What goes along with a micro-batch, a descriptor a segment, and what it says of them.

    numbers: of all segments that the rank has then, those included that it had kept.
    """

    shared: Shared
    descriptors: Sequence[int]
    numbers: Numbers


def share(spans: Sequence[memoryview], most: int, kept: Numbers = _NONE) -> Sharing | None:
    """Which of these go as at most so many descriptors; None if none should.

    kept: segments whose descriptors the rank has. The descriptors are the segments' own: open as
    long as the spans are there.
    """
    segments = list(map(segment_of, spans))
    nbytes: dict[Segment, int] = {}
    for segment, span in zip(segments, spans, strict=True):
        if segment is not None:
            nbytes[segment] = nbytes.get(segment, 0) + len(span)
    known = kept.keys() & nbytes.keys()
    new = [at for at, there in nbytes.items() if there >= LEAST_BYTES_EACH and at not in known]
    if len(new) > most:
        new = sorted(new, key=nbytes.__getitem__, reverse=True)[:most]
    if sum(map(nbytes.__getitem__, (*known, *new))) < LEAST_BYTES:
        return None
    numbers = {**kept, **dict(zip(new, count(len(kept)), strict=False))} if new else kept
    places = [_place(segment, span, numbers) for segment, span in zip(segments, spans, strict=True)]
    return Sharing(Shared(list(map(len, new)), places), [it.descriptor for it in new], numbers)


def _place(segment: Segment | None, span: memoryview, numbers: Numbers) -> tuple[int, int] | None:
    if segment is None or segment not in numbers or not len(span):
        return None
    start = segment.start_of(span)
    return None if start is None else (numbers[segment], start)
