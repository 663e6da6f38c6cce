"""Frames: cut a byte stream into (type, header, payload), and nothing else.

    offset  size  field
    0       2     magic, b"RD"
    2       1     type of the message
    3       1     reserved, 0
    4       4     header length, little endian, a multiple of 8
    8       8     payload length, little endian
    16      ...   header: JSON, padded with spaces so that the payload is 8-byte aligned
    ...     ...   payload: raw tensor memory

Sizes are checked against the limits before memory is allocated. A `FrameReader` has no socket: it
offers memory to fill (`get_buffers`), and its caller reports the bytes filled (`received`). That
fits `recvmsg_into`, asyncio's BufferedProtocol and `recv_into`.

A payload is received into its own memory, in the pieces that `allocate` returns for its header, so
that pieces need not be copied, and are freed one by one.

Before a payload or a large header is allocated, `admit` decides on the whole of it, unless the
frame is complete already. If it declines, the reader waits (`waits_for`) until `go_on`.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from rollout_dispatcher.errors import FrameTooLarge, ProtocolError

MAGIC = b"RD"
PREFIX = struct.Struct("<2sBBIQ")
#: Small frames a read, which are all handled in one turn of the event loop: some hundred of the
#: smallest, so milliseconds. What is left of a larger one is received straight into its own memory.
STAGING_BYTES = 8 * 1024
#: Buffers to offer at a time: megabytes in samples of some ten kilobytes, and far below IOV_MAX.
MAX_BUFFERS = 128
#: Bytes to offer memory for at a time: less than a millisecond's worth, while others wait.
READ_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The largest header and payload, in bytes, that a receiver is willing to hold."""

    header: int
    payload: int


#: Limits before a peer's HELLO: room for that message alone.
HANDSHAKE_LIMITS = FrameLimits(header=16 * 1024, payload=0)


#: From type, header and payload size of a frame: memory for the payload.
Allocate = Callable[[int, memoryview, int], Sequence[memoryview]]
#: Whether a frame of so many bytes may have memory now; only its prefix has arrived.
Admit = Callable[[int], bool]


class Frame(NamedTuple):
    """One frame; `parts` is its payload, in memory of its own."""

    type: int
    header: memoryview
    parts: Sequence[memoryview] = ()

    @property
    def payload(self) -> memoryview:
        """The payload of a frame in one piece."""
        (whole,) = self.parts or (memoryview(b""),)
        return whole


def in_one_piece(frame_type: int, header: memoryview, size: int) -> Sequence[memoryview]:  # noqa: ARG001
    """The default way to allocate a payload."""
    return (memoryview(bytearray(size)),)


def at_once(nbytes: int) -> bool:  # noqa: ARG001
    """The default way to admit a frame."""
    return True


def encode_frame(frame_type: int, header: bytes, payload_size: int = 0) -> bytes:
    """Prefix and padded header; the payload's own buffers follow it on the wire."""
    padded = header + b" " * (-len(header) % 8)
    return PREFIX.pack(MAGIC, frame_type, 0, len(padded), payload_size) + padded


def frame_bytes(head: bytes | bytearray | memoryview) -> int:
    """Size of a whole frame (prefix, header, payload) from its first bytes."""
    _, _, _, header, payload = PREFIX.unpack_from(head)
    nbytes: int = PREFIX.size + header + payload
    return nbytes


class FrameReader:
    """Incremental decoder of one direction of one connection."""

    def __init__(self, limits: FrameLimits = HANDSHAKE_LIMITS) -> None:
        self.limits = limits
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = self._end = 0
        #: Memory of the current frame; while it is not full, nothing is staged.
        self._pieces = NO_PIECES
        self._type = self._header_size = self._payload_size = 0
        #: Bytes of the frame that waits for admission; 0 if none.
        self.waits_for = 0
        self._header: memoryview | None = None
        self._parts: Sequence[memoryview] | None = None

    def get_buffer(self) -> memoryview:
        """The first of `get_buffers`."""
        return self.get_buffers()[0]

    def get_buffers(self) -> list[memoryview]:
        """Memory for the next bytes of the stream, in order; no piece is empty."""
        if self._pieces.is_full:
            if self._start:
                self._compact()
            return [self._staging[self._end :]]
        found, whole = self._pieces.next(MAX_BUFFERS, READ_BYTES)
        if whole:
            found.append(self._staging)
        return found

    @property
    def filled(self) -> int:
        """Bytes of the current frame that have arrived, behind its prefix."""
        header = 0 if self._parts is None else self._header_size
        return header + self._pieces.nbytes_filled if self._header is not None else 0

    def received(
        self, nbytes: int, allocate: Allocate = in_one_piece, admit: Admit = at_once
    ) -> Iterator[Frame]:
        """`nbytes` bytes were written into `get_buffers()`; return the frames now complete.

        Frames are cut while the iterator advances, so `limits` may change between two of them;
        exhaust it before the next `get_buffers`. It raises ProtocolError or FrameTooLarge, after
        which the stream cannot be read further. While a frame waits for admission it is empty, and
        there is room for one read's worth of bytes.
        """
        if self._pieces.is_full:
            self._end += nbytes
        else:
            self._start, self._end = 0, self._pieces.filled(nbytes)
        return self._complete(allocate, admit)

    def go_on(self, allocate: Allocate = in_one_piece, admit: Admit = at_once) -> Iterator[Frame]:
        """Admit the waiting frame; return the frames now complete, as `received` does."""
        assert self.waits_for
        self._open()
        return self._complete(allocate, admit)

    def drop(self) -> None:
        """Release the memory of the current frame: nothing more is read."""
        self._header = self._parts = None
        self._pieces = NO_PIECES
        self.waits_for = 0

    def _complete(self, allocate: Allocate, admit: Admit) -> Iterator[Frame]:
        while self._header is not None or (self._start < self._end and self._take_prefix(admit)):
            assert self._header is not None
            if not (self._pieces.is_full or self._fill()):
                return
            if self._parts is None:
                self._parts = allocate(self._type, self._header, self._payload_size)
                if self._parts:
                    self._pieces = Pieces(self._parts)
                    if not self._fill():
                        return
            frame = Frame(self._type, self._header, self._parts)
            self._header = self._parts = None
            self._pieces = NO_PIECES  # so that a quiet connection does not keep its last frame
            yield frame
        if self._start == self._end:
            self._start = self._end = 0

    def _take_prefix(self, admit: Admit) -> bool:
        """Whether a frame has begun and is admitted."""
        if self.waits_for:
            return False
        held = self._end - self._start
        magic = bytes(self._staging[self._start : self._start + min(held, len(MAGIC))])
        if not MAGIC.startswith(magic):
            raise ProtocolError(
                f"expected a frame, got bytes that start with {magic!r}; rollout workers and DP "
                "ranks connect to the dispatcher's sample plane (--listen), HTTP is served on "
                "another address (--http)"
            )
        if held < PREFIX.size:
            return False
        _, self._type, reserved, header, payload = PREFIX.unpack_from(self._staging, self._start)
        self._check(reserved, header, payload)
        self._start += PREFIX.size
        self._header_size, self._payload_size = header, payload
        if payload + header > self._end - self._start:
            # A header within one read needs no memory beyond the staging area.
            nbytes = payload + (header if header > STAGING_BYTES else 0)
            if nbytes and not admit(nbytes):
                self.waits_for = nbytes
                return False
        self._open()
        return True

    def _open(self) -> None:
        """Allocate the header; mostly it has arrived whole."""
        self.waits_for = 0
        start, end = self._start, self._start + self._header_size
        if end <= self._end:
            self._header, self._start = memoryview(bytes(self._staging[start:end])), end
        else:
            self._header = memoryview(bytearray(self._header_size))
            self._pieces = Pieces((self._header,))

    def _fill(self) -> bool:
        """Move staged bytes into the frame's memory; returns whether that is full."""
        self._start += self._pieces.copy(self._staging[self._start : self._end])
        return self._pieces.is_full

    def _check(self, reserved: int, header: int, payload: int) -> None:
        if reserved or header % 8:
            raise ProtocolError(
                f"malformed frame prefix (reserved {reserved}, header {header} bytes)"
            )
        if header > self.limits.header:
            raise FrameTooLarge("header", header, self.limits.header)
        if payload > self.limits.payload:
            raise FrameTooLarge("payload", payload, self.limits.payload)

    def _compact(self) -> None:
        """Move the staged bytes to the front of the staging area."""
        held = self._end - self._start
        self._staging[:held] = self._staging[self._start : self._end]
        self._start, self._end = 0, held


class Pieces:
    """Pieces of memory that bytes are received into, in order.

    is_full: whether no byte is missing; an attribute, as it is read several times a frame.
    """

    def __init__(self, pieces: Iterable[memoryview] = ()) -> None:
        self._pieces = list(filter(len, pieces))
        #: End of each piece, from the start of the first.
        self._ends = list(accumulate(map(len, self._pieces)))
        self._full = self._filled = 0  # pieces, and bytes
        self.is_full = not self._pieces

    @property
    def nbytes_filled(self) -> int:
        """Bytes written so far."""
        return self._filled

    def missing(self, count: int) -> list[memoryview]:
        """Memory for the next bytes, in order: at most `count` pieces."""
        found = self._pieces[self._full : self._full + count]
        if found:
            found[0] = found[0][self._filled - self._ends[self._full] :]
        return found

    def next(self, count: int, nbytes: int) -> tuple[list[memoryview], bool]:
        """The same, fewer than `count` pieces of at most `nbytes`; and whether these are all."""
        end = self._filled + nbytes
        last = bisect_left(self._ends, end, lo=self._full)  # that has the last of these bytes
        found = self.missing(min(count - 1, last + 1 - self._full))
        behind = self._full + len(found)
        if behind > last and (beyond := self._ends[last] - end) > 0:
            found[-1] = found[-1][:-beyond]
            return found, False
        return found, behind == len(self._pieces)

    def filled(self, nbytes: int) -> int:
        """`nbytes` more bytes were written; returns the number beyond the end."""
        total = self._ends[-1] if self._ends else 0
        beyond = max(0, self._filled + nbytes - total)
        self._filled += nbytes - beyond
        self._full = bisect_right(self._ends, self._filled, lo=self._full)
        self.is_full = self._full == len(self._pieces)
        return beyond

    def copy(self, data: memoryview) -> int:
        """Copy data into the missing part; returns the number of bytes copied."""
        copied = 0
        for piece in self.missing(len(self._pieces)):
            taken = min(len(piece), len(data) - copied)
            piece[:taken] = data[copied : copied + taken]
            copied += taken
            if copied == len(data):
                break
        self.filled(copied)
        return copied


#: No memory to fill.
NO_PIECES = Pieces()
