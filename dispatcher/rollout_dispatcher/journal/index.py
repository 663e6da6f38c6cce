"""The index: the state as of the last snapshot, as records in one file.

A record has a key, its value as JSON, and a checksum chained from that of the record before. A
snapshot appends the changed records and ends with a snapshot record; records without one behind
them do not count. When the file is full, the next snapshot writes all live records to the spare,
`index.spare`, which replaces the file. So a snapshot costs what has changed, and from time to time
a copy of all records, without decoding them.

Invariants: a loaded record is as it was written. Behind damage an older snapshot counts: the log is
replayed from there, or recovery reports the segments freed since as missing. The spare has room for
the next snapshot (`reserve`). Only the journal's one thread uses the index, under the journal's
lock.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path
from struct import Struct
from typing import Any
from zlib import crc32

from rollout_dispatcher.errors import JournalFull
from rollout_dispatcher.journal.files.disk import disk_errors, open_ours, sync_directory
from rollout_dispatcher.journal.parts import Ledger, LiveSample, ProducerRecord, StepRecord
from rollout_dispatcher.journal.records import schema_of, schema_row
from rollout_dispatcher.journal.state import Newest, State
from rollout_dispatcher.payload import StoredObject

#: `json.dumps` would build an encoder for each of the many small values.
_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
#: Key and bytes of a value; behind the value, the checksum of the file up to there.
_HEADER, _CHECKSUM = Struct("<17sI"), Struct("<I")
_OVERHEAD = _HEADER.size + _CHECKSUM.size
#: First byte of a key; the other 16 are a number, or a digest of a name.
_SCHEMA, _KEPT, _STEP, _PRODUCER, _IDS, _GROUPS = b"c", b"k", b"s", b"p", b"i", b"g"
#: Key of the record that ends a snapshot.
_SNAPSHOT = b"=".ljust(17)
#: Value of a deleted key.
_GONE = b""
#: Least size of a file.
_LEAST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in the log: everything before it is in the index."""

    segment: int
    offset: int
    sequence: int
    lsn: int


class _Records:
    """The records of a file, up to its last snapshot. places: offset and bytes of each value.

    The file is created if it is missing. blank: its present content does not count.
    """

    def __init__(self, path: Path, *, blank: bool = False) -> None:
        self.path = path
        self.places: dict[bytes, tuple[int, int]] = {}
        self._end = self._checksum = 0
        with disk_errors("open", path):
            self._handle = open_ours(path, os.O_CREAT)
        with disk_errors("read", path):
            self.size = os.fstat(self._handle).st_size
            if not blank:
                self._find()

    def _find(self) -> None:
        at = checksum = 0
        found: dict[bytes, tuple[int, int]] = {}
        while len(header := self._read(at, _HEADER.size)) == _HEADER.size:
            key, nbytes = _HEADER.unpack(header)
            start = at + _HEADER.size
            if start + nbytes > self.size:
                return
            value, end = self._read(start, nbytes), self._read(start + nbytes, _CHECKSUM.size)
            checksum = crc32(value, crc32(header, checksum))
            if end != _CHECKSUM.pack(checksum):
                return
            at, found[key] = start + nbytes + _CHECKSUM.size, (start, nbytes)
            if key == _SNAPSHOT:
                self._count(found, at, checksum)
                found = {}

    def _count(self, found: dict[bytes, tuple[int, int]], end: int, checksum: int) -> None:
        self.places |= found
        for key, (_, nbytes) in found.items():
            if not nbytes:
                del self.places[key]
        self._end, self._checksum = end, checksum

    @property
    def live_bytes(self) -> int:
        """Bytes of the live records."""
        return sum(nbytes + _OVERHEAD for _, nbytes in self.places.values())

    @property
    def left(self) -> int:
        """Bytes that the file still has for records."""
        return self.size - self._end

    def value(self, key: bytes) -> bytes:
        """The value of a live record."""
        at, nbytes = self.places[key]
        with disk_errors("read", self.path):
            return self._read(at, nbytes)

    def _read(self, at: int, nbytes: int) -> bytes:
        return os.pread(self._handle, nbytes, at)

    def allocate(self, nbytes: int) -> None:
        """Preallocate the file. Raises JournalFull."""
        if nbytes > self.size:
            with disk_errors(f"reserve {nbytes} bytes for", self.path):
                os.posix_fallocate(self._handle, 0, nbytes)
            self.size = nbytes

    def append(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Write the records of a snapshot, its own last, and sync. A failure changes nothing."""
        at, checksum = self._end, self._checksum
        found: dict[bytes, tuple[int, int]] = {}
        with disk_errors("write", self.path):
            for key, value in records:
                header = _HEADER.pack(key, len(value))
                checksum = crc32(value, crc32(header, checksum))
                found[key] = (at + _HEADER.size, len(value))
                record = header + value + _CHECKSUM.pack(checksum)
                while record:
                    written = os.pwrite(self._handle, record, at)
                    at, record = at + written, record[written:]
            os.fdatasync(self._handle)
        self._count(found, at, checksum)

    def replace(self, other: "_Records") -> None:
        """Replace another file."""
        with disk_errors("replace", other.path):
            self.path.rename(other.path)
            sync_directory(other.path.parent)
        self.path = other.path
        other.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


class Index:
    """Loads the state once, then stores its changes. limit: bytes of both files."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit // 2
        with ExitStack() as undo:
            self._records = undo.enter_context(closing(_Records(path)))
            self._spare = undo.enter_context(closing(self._new_spare()))
            self.reserve(0)
            undo.pop_all()

    def _new_spare(self) -> _Records:
        return _Records(self._path.with_suffix(".spare"), blank=True)

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return self._records.size + self._spare.size

    def close(self) -> None:
        """Close the files."""
        self._records.close()
        self._spare.close()

    def reserve(self, log_bytes: int) -> None:
        """Preallocate the spare for a snapshot after `log_bytes` more. Raises JournalFull.

        At worst it has all live records and the new ones, which take no more than in the log. As
        much again is for the snapshots that follow.
        """
        most = max(_LEAST_BYTES, 2 * self._records.live_bytes + log_bytes)
        self._spare.allocate(min(most, self._limit))

    # -- snapshot -------------------------------------------------------------------------

    def take_snapshot(self, state: State, position: LogPosition) -> None:
        """Make the state at `position` durable. A failure changes nothing. Raises JournalFull."""
        ledger = asdict(state.ledger) | {"phases": state.phases()}
        last: dict[str, Any] = {"position": asdict(position), "ledger": ledger}
        for name, newest in (("ids", state.given_ids), ("groups", state.ended_groups)):
            last[name] = [newest.first, newest.stored + len(newest.new)]
        changed = dict(self._changed(state)) | {_SNAPSHOT: _encoded(last)}
        if _bytes_of(changed) <= self._records.left:
            self._records.append(changed.items())
        else:
            self._rewrite(changed)
        state.ledger.phases = ledger["phases"]
        state.snapshot_taken()

    def _rewrite(self, changed: dict[bytes, bytes]) -> None:
        """Write all live records to the spare, which replaces the file."""
        before = self._records
        kept = [key for key in before.places if key not in changed]
        new = {key: value for key, value in changed.items() if value}
        nbytes = sum(before.places[key][1] + _OVERHEAD for key in kept) + _bytes_of(new)
        if nbytes > self._limit:
            raise JournalFull(
                f"the index {self._path} is full at {2 * self._limit} bytes; new samples are "
                "refused until there is room: restart with a larger map"
            )
        self._spare.allocate(nbytes)
        self._spare.append(chain(((key, before.value(key)) for key in kept), new.items()))
        self._spare.replace(before)
        self._records, self._spare = self._spare, self._new_spare()

    def _changed(self, state: State) -> Iterator[tuple[bytes, bytes]]:
        changed = state.changed
        for number in changed.schemas:
            yield _key(_SCHEMA, number), _encoded(schema_row(state.schemas[number]))
        for number in sorted(changed.shelves):
            rows = [kept.row() for kept in state.shelf(number)]
            yield _key(_KEPT, number), _encoded(rows) if rows else _GONE
        for number in changed.steps:
            step = state.steps.get(number)
            yield _key(_STEP, number), _GONE if step is None else _encoded(step.row())
        for name in changed.producers:  # a name may be longer than a key
            digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            producer = state.producers.get(name)
            yield _PRODUCER + digest, _GONE if producer is None else _encoded(producer.row(name))
        yield from self._newest(_IDS, state.given_ids)
        yield from self._newest(_GROUPS, state.ended_groups)

    def _newest(self, kind: bytes, values: Newest[Any]) -> Iterator[tuple[bytes, bytes]]:
        """The new values as one record, under the number of the first; too old ones are deleted."""
        firsts = [key for key in self._records.places if key[:1] == kind]
        for key, following in pairwise([*firsts, _key(kind, values.stored)]):
            if following <= _key(kind, values.first):
                yield key, _GONE
        if values.new:
            yield _key(kind, values.stored), _encoded([*values.new])

    # -- load -------------------------------------------------------------------------------

    def load(self, state: State) -> LogPosition | None:
        """Fill an empty state; returns None without a snapshot."""
        if _SNAPSHOT not in self._records.places:
            return None
        last = self._value(_SNAPSHOT)
        last["ledger"].pop("posted", None)  # settings of 0.1
        state.ledger = Ledger(**last["ledger"])
        for name, newest in (("ids", state.given_ids), ("groups", state.ended_groups)):
            newest.first, newest.stored = last[name]
        for number, row in self._values(_SCHEMA):
            state.schemas[number] = schema_of(row)
        objects = dict[StoredObject, StoredObject]()
        for _, rows in self._values(_KEPT):
            for row in rows:
                state.keep(LiveSample.of(row, objects))
        for number, row in self._values(_STEP):
            step = state.steps[number] = StepRecord(*row)
            for ticket in step.tickets():
                state.kept[ticket].step = number
        for _, (name, floor, accepted, *ends) in self._values(_PRODUCER):
            state.producers[name] = ProducerRecord(floor, set(accepted), *ends)
        return LogPosition(**last["position"])

    def given_ids(self, state: State) -> tuple[tuple[str, int | None], ...]:
        """The given ids in the dedup window, with their samples' checksums, oldest first."""
        return self._within_horizon(_IDS, state.given_ids)

    def ended_groups(self, state: State) -> tuple[tuple[str, str], ...]:
        """The ended groups that are kept, with the reason of each, oldest first."""
        return self._within_horizon(_GROUPS, state.ended_groups)

    def _within_horizon(self, kind: bytes, values: Newest[Any]) -> tuple[Any, ...]:
        stored = (
            (first, one, other)
            for number, pairs in self._values(kind)
            for first, (one, other) in enumerate(pairs, number)
        )
        oldest = values.oldest
        return (*((one, other) for at, one, other in stored if at >= oldest), *values.new)

    def _values(self, kind: bytes) -> Iterator[tuple[int, Any]]:
        """All values of a kind, by number."""
        for key in sorted(key for key in self._records.places if key[:1] == kind):
            yield int.from_bytes(key[1:]), self._value(key)

    def _value(self, key: bytes) -> Any:
        return json.loads(self._records.value(key))


def _key(kind: bytes, number: int) -> bytes:
    return kind + number.to_bytes(16)


def _encoded(value: object) -> bytes:
    return _ENCODE(value).encode()


def _bytes_of(records: Mapping[bytes, bytes]) -> int:
    return sum(len(value) + _OVERHEAD for value in records.values())
