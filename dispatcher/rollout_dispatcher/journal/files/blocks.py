"""The block: a group of batches as one atomic piece of the log.

    header     64 bytes: magic, number of payloads, digest of the rest of the head, segment,
               sequence, last LSN, bytes of rows and of payloads
    checksums  a crc32 of 4 bytes for each payload
    rows       JSON: [rows, totals], padded to 8 bytes; up to here it is the *head*
    payloads   one after the other, each padded to 8 bytes

The head is written last. Checksums are apart from the rows, so the size of the head is known before
them, and the disk can write payloads while they are summed.

`sequence` numbers blocks without gaps. A block is read only at the end of the one before, and its
digest is keyed by its segment's salt and its offset: neither earlier content of a reused file nor
the content of a payload is ever taken for a block.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from zlib import crc32

from rollout_dispatcher.journal.files.segment import Reader
from rollout_dispatcher.journal.files.segment_header import SegmentHeader
from rollout_dispatcher.journal.records import ACCEPTED, CHECKSUM, MOVED, NBYTES, Row
from rollout_dispatcher.spans import ALIGNMENT, aligned

MAGIC = b"rdB2"
#: Magic, number of payloads, digest, segment, sequence, LSN, bytes of rows and of payloads.
_HEADER = Struct("<4sI16sQQQQQ")
_DIGEST = slice(8, 24)
HEADER_SIZE = _HEADER.size
_CHECKSUM = Struct("<I")
_PADDING = [b"\0" * size for size in range(ALIGNMENT)]


@dataclass(frozen=True, slots=True)
class Header:
    """A block's header as read; it is one only if the digest matches."""

    num_payloads: int
    digest: bytes
    segment: int
    sequence: int
    lsn: int
    rows_bytes: int
    payload_bytes: int

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
    """A whole block as read: header, rows, totals, and the offsets of its payloads."""

    header: Header
    rows: list[Row]
    totals: str
    places: list[int]


def checksum(payload: memoryview | bytes, ticket: int) -> int:
    """crc32 of a payload that starts from its ticket, so that no other sample's passes for it."""
    return crc32(payload, ticket & 0xFFFFFFFF)


def has_payload(row: Row) -> bool:
    """Whether a row has a payload."""
    return row[0] in {ACCEPTED, MOVED}


def places(rows: Sequence[Row], start: int) -> Iterator[int]:
    """Offsets of the payloads of these rows if the first one is at `start`."""
    for row in rows:
        if has_payload(row):
            yield start
            start += aligned(row[NBYTES])


@dataclass(slots=True)
class Draft:
    """A block without an offset yet. text: rows and totals as JSON, without checksums."""

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
        """The payloads and their padding."""
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

    def head(self, front: SegmentHeader, offset: int, sequence: int, lsn: int) -> memoryview:
        """The head of the block at `offset`; `sum_up` comes first."""
        header = _HEADER.pack(
            MAGIC, len(self.payloads), b"", front.number, sequence, lsn, len(self.text),
            self.payload_bytes,
        )  # fmt: skip
        sums = b"".join(_CHECKSUM.pack(row[CHECKSUM]) for row in self.rows if has_payload(row))
        head = bytearray().join((header, sums, self.text))
        head[_DIGEST] = _digest(front, head, offset)
        head += _PADDING[-len(head) % ALIGNMENT]
        return memoryview(head)


def draft(rows: list[Row], payloads: list[memoryview], totals: str) -> Draft:
    """Encode rows and totals."""
    return Draft(rows, payloads, json.dumps([rows, totals], separators=(",", ":")).encode())


def read_block(reader: Reader, offset: int, sequence: int, synced: int = 0) -> Block | None:
    """The block of this sequence at `offset`; None if it is not whole.

    synced: blocks up to that sequence were synced, so they cannot be torn; damage to a payload of
    theirs is reported when the payload is read.
    Raises ValueError, TypeError, KeyError or IndexError for a block that we cannot have written.
    """
    header = _read_header(reader, offset)
    if header is None or header.sequence != sequence:
        return None
    if offset + header.size > reader.front.nbytes:
        return None
    head = bytearray(reader.read(offset, header.head_bytes))
    if _digest(reader.front, head, offset) != header.digest:
        return None
    text = len(head) - header.rows_bytes
    rows, totals = json.loads(head[text:])
    found = list(places(rows, offset + aligned(len(head))))
    sums = (sum_ for (sum_,) in _CHECKSUM.iter_unpack(head[HEADER_SIZE:text]))
    checked = sequence > synced
    whole = _fill_in(reader, rows, found, sums, checked=checked)
    return Block(header, rows, totals, found) if whole else None


def _fill_in(
    reader: Reader, rows: list[Row], found: list[int], sums: Iterable[int], *, checked: bool
) -> bool:
    """Put checksums into their rows; if `checked`, returns whether they match the payloads."""
    for row, place, sum_ in zip(filter(has_payload, rows), found, sums, strict=True):
        row[CHECKSUM] = sum_
        if checked and checksum(reader.read(place, row[NBYTES]), row[1]) != sum_:
            return False
    return True


def begins_block(reader: Reader, offset: int, sequence: int) -> bool:
    """Whether the bytes at `offset` begin like the block of this sequence."""
    header = _read_header(reader, offset)
    return header is not None and header.sequence == sequence


def _read_header(reader: Reader, offset: int) -> Header | None:
    data = reader.read(offset, HEADER_SIZE)
    if len(data) < HEADER_SIZE:
        return None
    magic, *values = _HEADER.unpack(data)
    header = Header(*values)
    return header if magic == MAGIC and header.segment == reader.front.number else None


def _digest(front: SegmentHeader, head: bytearray, offset: int) -> bytes:
    """The digest of a head without padding, the digest itself left out."""
    start = bytes(head[: _DIGEST.start])
    return front.digest(offset, start, memoryview(head)[_DIGEST.stop :])
