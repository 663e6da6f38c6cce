"""Frames: cut a byte stream into (type, header, payload), and nothing else.

    offset  size  field
    0       2     magic, b"RD"
    2       1     type of the message
    3       1     reserved, 0
    4       4     header length, little endian, a multiple of 8
    8       8     payload length, little endian
    16      ...   header: JSON, padded with spaces so that the payload is 8-byte aligned
    ...     ...   payload: raw tensor memory

Sizes are checked against the limits before anything is allocated. There is no socket here: a
`FrameReader` offers memory to fill (`get_buffers`) and is told how much of it was filled
(`received`), which serves `recvmsg_into`, asyncio's BufferedProtocol and `recv_into` alike.

A payload is received into memory of its own, in as many pieces as `allocate` makes of it: whoever
cuts it up says so when the header is there, and nothing has to be copied or freed together.

Before there is memory for a payload, or a large header, `admit` is asked for all of it, unless the
whole frame is here. If it says no, the reader stays where it is (`waits_for`) until `go_on`.
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


#: Before a peer has said who it is, it gets room for a HELLO and no more.
HANDSHAKE_LIMITS = FrameLimits(header=16 * 1024, payload=0)


#: Type, header and payload size of a frame: memory for its payload, so many bytes in all.
Allocate = Callable[[int, memoryview, int], Sequence[memoryview]]
#: Whether a frame of so many bytes, of which only the prefix has come, may have memory now.
Admit = Callable[[int], bool]


class Frame(NamedTuple):
    """One frame as it came; `parts` is its payload, in memory that belongs to this frame alone."""

    type: int
    header: memoryview
    parts: Sequence[memoryview] = ()

    @property
    def payload(self) -> memoryview:
        """The payload of a frame that was not cut up."""
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
    """Size of the whole frame that begins so, prefix, header and payload."""
    _, _, _, header, payload = PREFIX.unpack_from(head)
    nbytes: int = PREFIX.size + header + payload
    return nbytes


class FrameReader:
    """Incremental decoder of one direction of one connection."""

    def __init__(self, limits: FrameLimits = HANDSHAKE_LIMITS) -> None:
        self.limits = limits
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = self._end = 0
        #: What of the current frame has memory; while it is not full, nothing is staged.
        self._pieces = NO_PIECES
        self._type = self._header_size = self._payload_size = 0
        #: Bytes of the frame that was not admitted yet; 0 when none waits.
        self.waits_for = 0
        self._header: memoryview | None = None
        self._parts: Sequence[memoryview] | None = None

    def get_buffer(self) -> memoryview:
        """The first of `get_buffers`."""
        return self.get_buffers()[0]

    def get_buffers(self) -> list[memoryview]:
        """Memory that the next bytes of the stream belong into, in order; none of it is empty."""
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
        """How many bytes of the current frame have arrived, behind its prefix."""
        header = 0 if self._parts is None else self._header_size
        return header + self._pieces.nbytes_filled if self._header is not None else 0

    def received(
        self, nbytes: int, allocate: Allocate = in_one_piece, admit: Admit = at_once
    ) -> Iterator[Frame]:
        """Say that `nbytes` were written into `get_buffers()`; return the frames now complete.

        Frames are cut as they are asked for, so `limits` may change between two of them; ask for
        all of them before the next `get_buffers`. The iterator raises ProtocolError or
        FrameTooLarge; the stream cannot be read on after that. While a frame waits there are none,
        and no more than one read's worth of bytes finds room.
        """
        if self._pieces.is_full:
            self._end += nbytes
        else:
            self._start, self._end = 0, self._pieces.filled(nbytes)
        return self._complete(allocate, admit)

    def go_on(self, allocate: Allocate = in_one_piece, admit: Admit = at_once) -> Iterator[Frame]:
        """The frame that waits is admitted; return the frames now complete, as `received` does."""
        assert self.waits_for
        self._open()
        return self._complete(allocate, admit)

    def drop(self) -> None:
        """Let go of the memory of the current frame: nothing more is read."""
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
            self._pieces = NO_PIECES  # a quiet connection keeps nothing of its last frame in memory
            yield frame
        if self._start == self._end:
            self._start = self._end = 0

    def _take_prefix(self, admit: Admit) -> bool:
        """Whether a frame has begun, and may be received."""
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
            # A header that one read brings along costs no more than what it was read into.
            nbytes = payload + (header if header > STAGING_BYTES else 0)
            if nbytes and not admit(nbytes):
                self.waits_for = nbytes
                return False
        self._open()
        return True

    def _open(self) -> None:
        """Take memory for the header, most of which are here already, whole."""
        self.waits_for = 0
        start, end = self._start, self._start + self._header_size
        if end <= self._end:
            self._header, self._start = memoryview(bytes(self._staging[start:end])), end
        else:
            self._header = memoryview(bytearray(self._header_size))
            self._pieces = Pieces((self._header,))

    def _fill(self) -> bool:
        """Move what is staged to where it belongs; returns whether no byte is missing."""
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
        """Move what is left of the staging area to its front, so that there is room behind it."""
        held = self._end - self._start
        self._staging[:held] = self._staging[self._start : self._end]
        self._start, self._end = 0, held


class Pieces:
    """Pieces of memory that bytes are received into, from its start to its end.

    is_full: whether no byte is missing; asked several times a frame.
    """

    def __init__(self, pieces: Iterable[memoryview] = ()) -> None:
        self._pieces = list(filter(len, pieces))
        #: Where each piece ends, counted from the start of the first.
        self._ends = list(accumulate(map(len, self._pieces)))
        self._full = self._filled = 0  # pieces, and bytes
        self.is_full = not self._pieces

    @property
    def nbytes_filled(self) -> int:
        """Bytes that were written so far."""
        return self._filled

    def missing(self, count: int) -> list[memoryview]:
        """The memory that the next bytes belong into, in order: at most so many pieces."""
        found = self._pieces[self._full : self._full + count]
        if found:
            found[0] = found[0][self._filled - self._ends[self._full] :]
        return found

    def next(self, count: int, nbytes: int) -> tuple[list[memoryview], bool]:
        """The same, fewer pieces than that and at most so many bytes; and whether that is all."""
        end = self._filled + nbytes
        last = bisect_left(self._ends, end, lo=self._full)  # that has the last of these bytes
        found = self.missing(min(count - 1, last + 1 - self._full))
        behind = self._full + len(found)
        if behind > last and (beyond := self._ends[last] - end) > 0:
            found[-1] = found[-1][:-beyond]
            return found, False
        return found, behind == len(self._pieces)

    def filled(self, nbytes: int) -> int:
        """Note that so many more bytes were written; returns how many of them had no room here."""
        total = self._ends[-1] if self._ends else 0
        beyond = max(0, self._filled + nbytes - total)
        self._filled += nbytes - beyond
        self._full = bisect_right(self._ends, self._filled, lo=self._full)
        self.is_full = self._full == len(self._pieces)
        return beyond

    def copy(self, data: memoryview) -> int:
        """Take over as much as is missing; returns how many bytes that was."""
        copied = 0
        for piece in self.missing(len(self._pieces)):
            taken = min(len(piece), len(data) - copied)
            piece[:taken] = data[copied : copied + taken]
            copied += taken
            if copied == len(data):
                break
        self.filled(copied)
        return copied


#: Nothing to be filled.
NO_PIECES = Pieces()
