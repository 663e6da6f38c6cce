"""Micro-batches whose samples lie in segments of shared memory, made what they are when carried.

The spans of the samples are read from the segments straight to where their fields belong in the
payload: a system call a sample, during which other threads run, and no byte is copied twice. (To
map the segments first takes twice as long for samples of some ten kilobytes, for page faults.)
A micro-batch of one large sample is its span already, so that is mapped and nothing is read:
privately, so that who writes to it changes nobody else's bytes.

Invariant: a segment is known to be sealed before it is looked at, so nobody can cut it off under a
mapping, or keep a read waiting. A payload that is mapped keeps a descriptor open until the last
view of it is gone, of which there are few: at most `mappings` at a time.
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rollout_dispatcher.errors import ProtocolError, SegmentRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.pieces import Pieces
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.transport.memory import Memory
from rollout_dispatcher.transport.shared_memory.segments import check_segment
from rollout_workers.rank.payload import Whole

#: A sample in a segment: the segment's descriptor, the byte there, and how many these are.
Span = tuple[int, int, int]
#: What the header of a micro-batch that was carried says of segments: nothing.
_CARRIED = {"segments": None, "segment_places": None, "keep_segments": False}
#: A span of fewer bytes is copied: its page faults take longer.
MAPPED_BYTES = 512 * 1024


class Gatherer:
    """Gathers the micro-batches of one client, in one thread.

    memory: gives what a payload is gathered into. mappings: how many payloads may be mapped at a
    time, those that the training loop still has included. limit: the bytes of the largest payload.
    """

    def __init__(self, memory: Memory, mappings: int, limit: int) -> None:
        self._memory, self._limit = memory, limit
        #: One a mapping that may be made; whoever lets go of the last view gives it back.
        self._free = deque(range(mappings))

    def gather(
        self,
        schema: Schema,
        header: m.MicroBatch,
        carried: memoryview,
        segments: Sequence[tuple[int, int]],
    ) -> tuple[m.MicroBatch, memoryview]:
        """A micro-batch as it would have come in one piece: its header and its payload.

        carried: the payload of its frame. segments: a descriptor each, of what was found to be
        sealed, and the bytes that it is said to have; they stay open. Raises SegmentRefused and
        ProtocolError where one does not have what is said to be there.
        """
        whole = Whole(schema, header, list(_spans(schema, header, segments)))
        if whole.nbytes > self._limit:
            raise ProtocolError(
                f"micro-batch {header.index} of step {header.step} has {whole.nbytes} payload "
                f"bytes, of at most {self._limit}"
            )
        payload = self._gather(whole, header, carried, segments)
        return header.model_copy(update=_CARRIED), payload

    def _gather(
        self,
        whole: Whole[Span],
        header: m.MicroBatch,
        carried: memoryview,
        segments: Sequence[tuple[int, int]],
    ) -> memoryview:
        places = header.segment_places or ()
        if len(places) == 1 and places[0] and whole.nbytes >= MAPPED_BYTES and self._free:
            index, offset = places[0]
            check_segment(*segments[index])
            with suppress(OSError):  # for want of descriptors, mappings or memory: then it is read
                return self._mapped(segments[index][0], offset, whole.nbytes)
        whole.check_carried(carried.nbytes)
        return whole.put_together(carried, self._memory, _read)

    def _mapped(self, descriptor: int, offset: int, nbytes: int) -> memoryview:
        """These bytes of a segment, without a copy until somebody writes to them."""
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(
            descriptor,
            offset - begin + nbytes,
            mmap.MAP_PRIVATE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            offset=begin,
        )
        weakref.finalize(mapping, self._free.append, self._free.pop()).atexit = False
        return memoryview(mapping)[offset - begin :]


def _spans(
    schema: Schema, header: m.MicroBatch, segments: Sequence[tuple[int, int]]
) -> Iterator[Span | None]:
    """Where each sample lies, None for one in the frame; raises ProtocolError for one beyond."""
    places = header.segment_places or ()
    sizes = schema.sizes(header.tokens, header.rows_of(schema))
    for place, nbytes in zip(places, sizes, strict=True):
        if place is None:
            yield None
            continue
        index, offset = place
        descriptor, end = segments[index] if index < len(segments) else (-1, 0)
        if descriptor < 0 or offset + nbytes > end:
            raise ProtocolError(
                f"micro-batch {header.index} of step {header.step} has a sample of {nbytes} "
                f"bytes at byte {offset} of segment {index}, which has {end}"
            )
        yield descriptor, offset, nbytes


def _read(span: Span, pieces: Sequence[memoryview]) -> None:
    """The bytes of a span, to where they belong."""
    descriptor, offset, size = span
    nbytes = os.preadv(descriptor, pieces, offset)
    if nbytes == size:
        return
    rest = Pieces(pieces)  # a system call reads 2 GiB at the most
    while nbytes:
        rest.filled(nbytes)
        if rest.is_full:
            return
        offset += nbytes
        nbytes = os.preadv(descriptor, rest.missing(len(pieces)), offset)
    raise SegmentRefused("it ends before a sample that lies in it")
