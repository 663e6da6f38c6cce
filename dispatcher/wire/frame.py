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
`FrameReader` offers memory to fill (`get_buffer`) and is told how much of it was filled
(`received`), which serves asyncio's BufferedProtocol and a blocking `recv_into` alike.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dispatcher.errors import FrameTooLarge, ProtocolError

MAGIC = b"RD"
PREFIX = struct.Struct("<2sBBIQ")
#: Two pages of small frames a read; larger frames are received straight into their own memory.
STAGING_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The largest header and payload, in bytes, that a receiver is willing to hold."""

    header: int
    payload: int


#: Before a peer has said who it is, it gets room for a HELLO and no more.
HANDSHAKE_LIMITS = FrameLimits(header=16 * 1024, payload=0)


class Frame(NamedTuple):
    """One frame as it came; `payload` views memory that belongs to this frame alone."""

    type: int
    header: memoryview
    payload: memoryview


def encode_frame(frame_type: int, header: bytes, payload_size: int = 0) -> bytes:
    """Prefix and padded header; the payload's own buffers follow it on the wire."""
    padded = header + b" " * (-len(header) % 8)
    return PREFIX.pack(MAGIC, frame_type, 0, len(padded), payload_size) + padded


class FrameReader:
    """Incremental decoder of one direction of one connection."""

    def __init__(self, limits: FrameLimits = HANDSHAKE_LIMITS) -> None:
        self.limits = limits
        self._staging = bytearray(STAGING_BYTES)
        self._start = self._end = 0
        self._body: bytearray | None = None
        self._filled = 0
        self._type = self._header_size = 0

    def get_buffer(self) -> memoryview:
        """Memory that the next bytes of the stream belong into; never empty."""
        if self._body is not None:
            return memoryview(self._body)[self._filled :]
        self._compact()
        return memoryview(self._staging)[self._end :]

    def received(self, nbytes: int) -> Iterator[Frame]:
        """Say that `nbytes` were written into `get_buffer()`; return the frames now complete.

        Frames are cut as they are asked for, so `limits` may change between two of them; ask for
        all of them before the next `get_buffer`. The iterator raises ProtocolError or
        FrameTooLarge; the stream cannot be read on after that.
        """
        if self._body is not None:
            self._filled += nbytes
        else:
            self._end += nbytes
        return iter(self._next_frame, None)

    def feed(self, data: bytes) -> list[Frame]:
        """`get_buffer` and `received` for bytes that are already somewhere else."""
        frames: list[Frame] = []
        view = memoryview(data)
        while view:
            target = self.get_buffer()
            taken = min(len(target), len(view))
            target[:taken] = view[:taken]
            view = view[taken:]
            frames += self.received(taken)
        return frames

    def _next_frame(self) -> Frame | None:
        if self._body is None and not self._open_body():
            return None
        assert self._body is not None
        if self._filled < len(self._body):
            return None
        view, self._body = memoryview(self._body), None
        return Frame(self._type, view[: self._header_size], view[self._header_size :])

    def _open_body(self) -> bool:
        held = self._end - self._start
        magic = bytes(self._staging[self._start : self._start + min(held, len(MAGIC))])
        if not MAGIC.startswith(magic):
            raise ProtocolError(
                f"expected a frame, got bytes that start with {magic!r}; "
                "this port speaks the dispatcher's sample plane, HTTP is served on another"
            )
        if held < PREFIX.size:
            return False
        _, self._type, reserved, header, payload = PREFIX.unpack_from(self._staging, self._start)
        self._check(reserved, header, payload)
        self._start += PREFIX.size
        self._header_size = header
        self._body = bytearray(header + payload)
        self._filled = min(len(self._body), self._end - self._start)
        self._body[: self._filled] = self._staging[self._start : self._start + self._filled]
        self._start += self._filled
        return True

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
