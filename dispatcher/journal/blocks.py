"""The block: a group of batches as one piece of the log, that is whole or does not exist.

    header     64 bytes: magic, crc32 of the rest of the head, segment, sequence, synced, last LSN,
               bytes of rows, bytes and number of payloads
    checksums  a crc32 of 4 bytes for each payload
    rows       JSON: [rows, totals], padded to 8 bytes; so far it is the *head*
    payloads   one after the other, each padded to 8 bytes

The head is written last. Checksums lie apart from the rows so that its size is known before they
are: the disk can work on the payloads while they are summed.

Blocks are numbered without gaps by `sequence`. `synced` is the last sequence that was known to be
on the disk when this block was written: it is how a reader tells a torn tail (nothing behind it
relies on what is missing) from damage (something does). A block names its segment, so that what a
file held before it was used again is never taken for news.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from zlib import crc32

from dispatcher.journal.records import ACCEPTED, CHECKSUM, MOVED, NBYTES, Row
from dispatcher.sample import ALIGNMENT, aligned

MAGIC = b"rdB1"
#: Magic, checksum, segment, sequence, synced, LSN, bytes of rows, of payloads, their number.
_HEADER = Struct("<4sIQQQQQQQ")
_SKIPS_CHECKSUM = 8
HEADER_SIZE = _HEADER.size
_CHECKSUM = Struct("<I")
_PADDING = [b"\0" * size for size in range(ALIGNMENT)]


@dataclass(frozen=True, slots=True)
class Header:
    """A block's header, as far as it makes sense by itself."""

    checksum: int
    segment: int
    sequence: int
    synced: int
    lsn: int
    rows_bytes: int
    payload_bytes: int
    num_payloads: int

    @property
    def head_bytes(self) -> int:
        """Bytes up to the payloads, without padding."""
        return HEADER_SIZE + _CHECKSUM.size * self.num_payloads + self.rows_bytes

    @property
    def size(self) -> int:
        """Bytes of the whole block."""
        return aligned(self.head_bytes) + self.payload_bytes


@dataclass(frozen=True, slots=True)
class Block:
    """A block that was read whole: its header, rows, totals, and where its payloads lie."""

    header: Header
    rows: list[Row]
    totals: str
    places: list[int]


def checksum(payload: memoryview | bytes, ticket: int) -> int:
    """crc32 of a payload that starts from its ticket, so that no other sample's passes for it."""
    return crc32(payload, ticket & 0xFFFFFFFF)


def has_payload(row: Row) -> bool:
    """Whether a row comes with a payload."""
    return row[0] in {ACCEPTED, MOVED}


def places(rows: Sequence[Row], start: int) -> Iterator[int]:
    """Where the payloads of these rows lie if the first one is at `start`."""
    for row in rows:
        if has_payload(row):
            yield start
            start += aligned(row[NBYTES])


@dataclass(slots=True)
class Draft:
    """A block without a place yet. text: rows and totals as JSON, without checksums."""

    rows: list[Row]
    payloads: list[memoryview]
    text: bytes

    @property
    def head_bytes(self) -> int:
        """Bytes up to the payloads."""
        return aligned(HEADER_SIZE + _CHECKSUM.size * len(self.payloads) + len(self.text))

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payloads, padding included."""
        return sum(aligned(payload.nbytes) for payload in self.payloads)

    def padded(self) -> list[memoryview]:
        """The payloads as they are written."""
        found = []
        for payload in self.payloads:
            found.append(payload)
            if short := -payload.nbytes % ALIGNMENT:
                found.append(memoryview(_PADDING[short]))
        return found

    def sum_up(self) -> None:
        """Put the payloads' checksums into their rows."""
        pending = iter(self.payloads)
        for row in self.rows:
            if has_payload(row):
                row[CHECKSUM] = checksum(next(pending), row[1])

    def head(self, segment: int, sequence: int, synced: int, lsn: int) -> memoryview:
        """The head, once the checksums are there."""
        tail = _HEADER.pack(
            MAGIC, 0, segment, sequence, synced, lsn, len(self.text), self.payload_bytes,
            len(self.payloads),
        )[_SKIPS_CHECKSUM:]  # fmt: skip
        sums = b"".join(_CHECKSUM.pack(row[CHECKSUM]) for row in self.rows if has_payload(row))
        rest = tail + sums + self.text
        head = MAGIC + _CHECKSUM.pack(crc32(rest)) + rest
        return memoryview(head + _PADDING[-len(head) % ALIGNMENT])


def draft(rows: list[Row], payloads: list[memoryview], totals: str) -> Draft:
    """Put rows and payloads together."""
    return Draft(rows, payloads, json.dumps([rows, totals], separators=(",", ":")).encode())


def read_header(view: memoryview, offset: int, segment: int) -> Header | None:
    """The header at `offset` if there is one, of this segment, whose block ends within `view`."""
    if offset + HEADER_SIZE > len(view):
        return None
    magic, *values = _HEADER.unpack_from(view, offset)
    header = Header(*values)
    if magic != MAGIC or header.segment != segment or offset + header.size > len(view):
        return None
    sum_ = crc32(view[offset + _SKIPS_CHECKSUM : offset + header.head_bytes])
    return header if sum_ == header.checksum else None


def read_block(view: memoryview, offset: int, segment: int) -> Block | None:
    """The block at `offset` if it is there as a whole.

    Raises ValueError, TypeError, KeyError or IndexError for a block that we cannot have written.
    """
    header = read_header(view, offset, segment)
    if header is None:
        return None
    end = offset + header.head_bytes
    rows, totals = json.loads(bytes(view[end - header.rows_bytes : end]))
    found = list(places(rows, offset + aligned(header.head_bytes)))
    sums = _CHECKSUM.iter_unpack(view[offset + HEADER_SIZE : end - header.rows_bytes])
    for row, place, (sum_,) in zip(filter(has_payload, rows), found, sums, strict=True):
        row[CHECKSUM] = sum_
        if checksum(view[place : place + row[NBYTES]], row[1]) != sum_:
            return None
    return Block(header, rows, totals, found)


def begins_block(data: bytes, offset: int, segment: int) -> bool:
    """Whether something at `offset` begins as a block of this segment would."""
    head = data[offset : offset + HEADER_SIZE].ljust(HEADER_SIZE, b"\0")
    magic, _, written_for, *_ = _HEADER.unpack(head)
    return bool(magic == MAGIC and written_for == segment)


def later_headers(data: bytes, start: int, segment: int) -> Iterator[Header]:
    """Headers of whole-looking blocks of this segment from `start` on, wherever they are."""
    view = memoryview(data)
    while (start := data.find(MAGIC, start)) >= 0:
        if header := read_header(view, start, segment):
            yield header
        start += 1
