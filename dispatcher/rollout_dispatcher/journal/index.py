"""The index: the state as of the last snapshot, as records in one file.

A record has a key, its value as JSON, and a checksum that goes on from that of the record before
it. A snapshot appends what has changed and ends with a record of its own: what no such record
follows does not count. When the file is full, the next snapshot writes all that counts into the
spare, `index.spare`, which then takes the file's place. So a snapshot costs what has changed, and
now and then what there is, copied without a look at it.

Invariants: what is loaded is what was written. Where the records break off, an older snapshot
counts: the log is read from there, or is found to lack what was freed since. The spare has room for
the next snapshot (`reserve`), so none ever lacks it. Only the journal's one thread uses the index,
under the journal's own lock.
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

#: `json.dumps` would make an encoder for each of the many small values.
_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
#: Key and bytes of a value; the checksum of both, and of all records before, follows.
_HEADER, _CHECKSUM = Struct("<17sI"), Struct("<I")
_OVERHEAD = _HEADER.size + _CHECKSUM.size
#: What keys begin with; the other 16 bytes are a number, or a digest of a name.
_SCHEMA, _KEPT, _STEP, _PRODUCER, _IDS, _GROUPS = b"c", b"k", b"s", b"p", b"i", b"g"
#: The record that ends a snapshot.
_SNAPSHOT = b"=".ljust(17)
#: What says that a key is there no more.
_GONE = b""
#: The least that a file has.
_LEAST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in the log: everything before it is in the index."""

    segment: int
    offset: int
    sequence: int
    lsn: int


class _Records:
    """The records of a file, up to its last snapshot. places: where each value is, and its bytes.

    The file is made if it is not there. blank: whatever it has does not count.
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
        """Of the records that count."""
        return sum(nbytes + _OVERHEAD for _, nbytes in self.places.values())

    @property
    def left(self) -> int:
        """Bytes of records that the file still takes."""
        return self.size - self._end

    def value(self, key: bytes) -> bytes:
        """What was found there to be whole."""
        at, nbytes = self.places[key]
        with disk_errors("read", self.path):
            return self._read(at, nbytes)

    def _read(self, at: int, nbytes: int) -> bytes:
        return os.pread(self._handle, nbytes, at)

    def allocate(self, nbytes: int) -> None:
        """Have so many bytes on the disk. Raises JournalFull."""
        if nbytes > self.size:
            with disk_errors(f"reserve {nbytes} bytes for", self.path):
                os.posix_fallocate(self._handle, 0, nbytes)
            self.size = nbytes

    def append(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Make a snapshot durable; its own record is the last. A failure changes nothing."""
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
        """Take the place of another file."""
        with disk_errors("replace", other.path):
            self.path.rename(other.path)
            sync_directory(other.path.parent)
        self.path = other.path
        other.close()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)


class Index:
    """Loads the state once, and then takes in what has changed. limit: bytes of both files."""

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
        """Let go of the files."""
        self._records.close()
        self._spare.close()

    def reserve(self, log_bytes: int) -> None:
        """Have disk for a snapshot after so many bytes more of the log. Raises JournalFull.

        It writes all that counts at the worst, and what is new, which takes no more than in the
        log. As much again is for the snapshots that follow.
        """
        most = max(_LEAST_BYTES, 2 * self._records.live_bytes + log_bytes)
        self._spare.allocate(min(most, self._limit))

    # -- snapshot -------------------------------------------------------------------------

    def take_snapshot(self, state: State, position: LogPosition) -> None:
        """Make the state durable as that of `position`. After a failure nothing has changed."""
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
        """Write all that counts, which is a file of its own from then on."""
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
        for name in changed.producers:  # names may be longer than keys
            digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            producer = state.producers.get(name)
            yield _PRODUCER + digest, _GONE if producer is None else _encoded(producer.row(name))
        yield from self._newest(_IDS, state.given_ids)
        yield from self._newest(_GROUPS, state.ended_groups)

    def _newest(self, kind: bytes, values: Newest[Any]) -> Iterator[tuple[bytes, bytes]]:
        """Those that are new, under the number of the first; those that are too old are gone."""
        firsts = [key for key in self._records.places if key[:1] == kind]
        for key, following in pairwise([*firsts, _key(kind, values.stored)]):
            if following <= _key(kind, values.first):
                yield key, _GONE
        if values.new:
            yield _key(kind, values.stored), _encoded([*values.new])

    # -- load -------------------------------------------------------------------------------

    def load(self, state: State) -> LogPosition | None:
        """Fill an empty state; None if there was no snapshot yet."""
        if _SNAPSHOT not in self._records.places:
            return None
        last = self._value(_SNAPSHOT)
        last["ledger"].pop("posted", None)  # settings, as 0.1 remembered them
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
        for _, (name, floor, accepted, *said) in self._values(_PRODUCER):
            state.producers[name] = ProducerRecord(floor, set(accepted), *said)
        return LogPosition(**last["position"])

    def given_ids(self, state: State) -> tuple[tuple[str, int | None], ...]:
        """The ids that are remembered, with their samples' checksums, oldest first."""
        return self._remembered(_IDS, state.given_ids)

    def ended_groups(self, state: State) -> tuple[tuple[str, str], ...]:
        """The ended groups that are remembered, and why each has, oldest first."""
        return self._remembered(_GROUPS, state.ended_groups)

    def _remembered(self, kind: bytes, values: Newest[Any]) -> tuple[Any, ...]:
        stored = (
            (first, one, other)
            for number, pairs in self._values(kind)
            for first, (one, other) in enumerate(pairs, number)
        )
        oldest = values.oldest
        return (*((one, other) for at, one, other in stored if at >= oldest), *values.new)

    def _values(self, kind: bytes) -> Iterator[tuple[int, Any]]:
        """All of a kind, by number."""
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
