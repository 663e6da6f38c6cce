"""The front of a segment: its identity, and how far it is known to be on the disk.

    0      header, 64 bytes: magic, format, number, bytes of the file, the last sequence before
           it, salt, digest
    512    mark, 24 bytes: a sequence up to which all blocks are on the disk, and its digest
    1024   another mark; they are written in turn, so that a torn one leaves the other
    1536   the first block

The header is written when the file becomes this segment, and is durable before anything else is
written. Its salt is random and new each time, and keys the digests of blocks, so neither earlier
content of the file nor bytes of payloads pass for a block. Each part has its own sector, since a
disk writes a sector whole or not at all.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from struct import Struct
from typing import Self

SECTOR = 512
_HEADER = Struct("<8sIIQQQ16s8s")
_MAGIC = b"rdsegmnt"
_FORMAT = 3
#: A number and its digest.
MARK_BYTES = 24
#: Offsets of the marks.
MARKS = (SECTOR, 2 * SECTOR)
#: Offset of a segment's first block.
FIRST_BLOCK = 3 * SECTOR


def mark(number: int, of: int) -> bytes:
    """A number with its digest; of: the segment's number, or 0, which keys the digest."""
    text = number.to_bytes(8, "little")
    return text + blake2b(text, salt=of.to_bytes(8, "little"), digest_size=16).digest()


def marked(data: bytes, places: Iterable[int], of: int) -> int | None:
    """The largest number of the whole marks at these places; None if none is whole."""
    found = []
    for at in places:
        number = int.from_bytes(data[at : at + 8], "little")
        if data[at : at + MARK_BYTES] == mark(number, of):
            found.append(number)
    return max(found, default=None)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A segment's header. after: all blocks up to this sequence were on the disk before it."""

    number: int
    nbytes: int
    after: int
    salt: bytes

    def salted(self) -> Self:
        """The same with another salt, which invalidates all its blocks."""
        return replace(self, salt=os.urandom(16))

    @classmethod
    def new(cls, number: int, nbytes: int, after: int) -> Self:
        """The header of a new segment, with a new salt."""
        return cls(number, nbytes, after, os.urandom(16))

    def pack(self) -> bytes:
        """All bytes before the first block."""
        header = self.header()
        parts = [header.ljust(SECTOR, b"\0")]
        parts += [self.mark(self.after).ljust(SECTOR, b"\0")] * len(MARKS)
        return b"".join(parts)

    def mark(self, sequence: int) -> bytes:
        """The mark that all blocks up to this sequence are on the disk."""
        return mark(sequence, self.number)

    def marked(self, data: bytes) -> int | None:
        """The last sequence that is marked as on the disk; None if no mark is whole."""
        return marked(data, MARKS, self.number)

    def digest(self, offset: int, *parts: bytes | memoryview) -> bytes:
        """16 bytes, keyed by the salt, of data at this offset."""
        found = blake2b(offset.to_bytes(8, "little"), key=self.salt, digest_size=16)
        for part in parts:
            found.update(part)
        return found.digest()

    def header(self) -> bytes:
        """The first 64 bytes."""
        fields = (_MAGIC, _FORMAT, 0, self.number, self.nbytes, self.after, self.salt)
        text = _HEADER.pack(*fields, b"")
        return text[:-8] + blake2b(text[:-8], digest_size=8).digest()

    @classmethod
    def read(cls, data: bytes) -> Self | None:
        """The header at the beginning of a file; None if it is not whole."""
        if len(data) < FIRST_BLOCK:
            return None
        _, _, _, number, nbytes, after, salt, _ = _HEADER.unpack_from(data)
        found = cls(number, nbytes, after, salt)
        return found if data[: _HEADER.size] == found.header() else None
