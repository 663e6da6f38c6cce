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
from collections.abc import Sequence
from contextlib import suppress

from rollout_dispatcher.errors import ProtocolError, SegmentRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.pieces import Pieces
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.spans import ALIGNMENT, PADDING
from rollout_dispatcher.transport.memory import Memory
from rollout_dispatcher.transport.shared_memory.segments import check_sealed, check_segment
from rollout_workers.rank.gather import Whole

#: A segment, by its index, and a byte in it.
Place = tuple[int, int]
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
        self, schema: Schema, header: m.MicroBatch, carried: memoryview, segments: Sequence[int]
    ) -> tuple[m.MicroBatch, memoryview]:
        """A micro-batch as it would have come in one piece: its header and its payload.

        carried: the payload of its frame. segments: a descriptor each, which stay open. Raises
        SegmentRefused for what is no sealed segment, and ProtocolError where it does not have what
        is said to be there.
        """
        sizes, places = header.segments or (), header.segment_places or ()
        for descriptor, _ in zip(segments, sizes, strict=True):
            check_sealed(descriptor)
        whole = Whole(schema, header, places)
        for place, nbytes in zip(places, schema.sizes(header.tokens, whole.rows), strict=True):
            if place is not None and place[1] + nbytes > sizes[place[0]]:
                raise ProtocolError(
                    f"micro-batch {header.index} of step {header.step} has a sample of {nbytes} "
                    f"bytes at byte {place[1]} of a segment of {sizes[place[0]]}"
                )
        if whole.nbytes > self._limit:
            raise ProtocolError(
                f"micro-batch {header.index} of step {header.step} has {whole.nbytes} payload "
                f"bytes, of at most {self._limit}"
            )
        payload = self._gather(whole, header, carried, segments)
        return header.model_copy(update={"segments": None, "segment_places": None}), payload

    def _gather(
        self,
        whole: Whole[Place],
        header: m.MicroBatch,
        carried: memoryview,
        segments: Sequence[int],
    ) -> memoryview:
        sizes, places = header.segments or (), header.segment_places or ()
        if len(places) == 1 and places[0] and whole.nbytes >= MAPPED_BYTES and self._free:
            index, offset = places[0]
            check_segment(segments[index], sizes[index])
            with suppress(OSError):  # for want of descriptors, mappings or memory: then it is read
                return self._mapped(segments[index], offset, whole.nbytes)
        whole.check_carried(carried.nbytes)
        return whole.put_together(
            carried, self._memory, lambda place, pieces: _read(segments[place[0]], place[1], pieces)
        )

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


#: What is read of the zeros between the fields of a span; nobody looks at it.
_ZEROS = [memoryview(bytearray(len(padding))) for padding in PADDING]


def _read(descriptor: int, offset: int, values: Sequence[memoryview]) -> None:
    """The values of a span that lies there, a piece a field."""
    parts = []
    for value in values:
        parts.append(value)
        if over := len(value) % ALIGNMENT:
            parts.append(_ZEROS[over])
    nbytes = os.preadv(descriptor, parts, offset)
    if nbytes == sum(map(len, parts)):
        return
    rest = Pieces(parts)  # a system call reads 2 GiB at the most
    while nbytes:
        rest.filled(nbytes)
        if rest.is_full:
            return
        offset += nbytes
        nbytes = os.preadv(descriptor, rest.missing(len(parts)), offset)
    raise SegmentRefused("it ends before a sample that lies in it")
