"""The index: the state as of the last snapshot, in LMDB.

Invariants: LMDB opens the file only once `lmdb_check` has found its pages sound, and each value has
a checksum that covers its key and tree, so damage is an error and never the end of the process; one
write transaction is one snapshot, committed with all of LMDB's syncs; the map has its full size
from opening on, so it is never grown under a view, and its file the disk that the next snapshots
take (`reserve`), so they never lack it; values are copied out (`buffers=False`), so no view
outlives its transaction. Only the journal's one thread uses it, under the journal's own lock.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import lmdb

from rollout_dispatcher.errors import JournalCorrupt, JournalError, JournalFull
from rollout_dispatcher.journal.files.disk import NO_ROOM, disk_errors
from rollout_dispatcher.journal.index.lmdb_check import check_index
from rollout_dispatcher.journal.parts import Ledger, LiveSample, ProducerRecord, StepRecord
from rollout_dispatcher.journal.records import schema_of, schema_row
from rollout_dispatcher.journal.state import Newest, State, T
from rollout_dispatcher.payload import StoredObject

if TYPE_CHECKING:
    _Transaction = lmdb.Transaction[bytes]
    _Database = lmdb._Database  # noqa: SLF001 - the stubs have no other name for it

#: `json.dumps` would make an encoder for each of the many small values.
_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_TREES = (b"values", b"schemas", b"kept", b"steps", b"producers", b"ids", b"groups")
#: The file grows by this much at the least.
_STEP_BYTES = 4 << 20
_POSITION, _LEDGER, _COUNTS = b"position", b"ledger", b"counts"


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in the log: everything before it is in the index."""

    segment: int
    offset: int
    sequence: int
    lsn: int


class Index:
    """Loads the state once, and then takes in what has changed."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        self._path = path
        self._map_bytes = map_bytes
        if path.is_symlink():
            raise JournalError(f"the index {path} is a link to another file; put that in its place")
        if path.exists():
            check_index(path, _TREES)
        with self._errors():
            self._env = lmdb.open(
                str(path), map_size=map_bytes, subdir=False, max_dbs=8, lock=False, mode=0o600
            )
        try:
            with self._errors():
                self._trees = tuple(_Tree(name, self._env.open_db(name)) for name in _TREES)
                (
                    self._values, self._schemas, self._kept, self._steps, self._producers,
                    self._ids, self._groups,
                ) = self._trees  # fmt: skip
            self.reserve(0)
        except JournalError:
            self._env.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return self._reserved

    def close(self) -> None:
        """Let go of the file."""
        self._env.close()

    def reserve(self, log_bytes: int) -> None:
        """Have disk for a snapshot after so many bytes more of the log. Raises JournalFull.

        It writes anew what has changed, which is all that there is at the worst, and what is new,
        which takes no more than in the log but for pages that are not full. What it frees counts
        again only two snapshots later.
        """
        steps = -(-(3 * self._used_bytes() + 2 * log_bytes) // _STEP_BYTES)
        most = min(max(1, steps) * _STEP_BYTES, self._map_bytes)
        self._reserved = self._path.stat().st_size
        if most <= self._reserved:
            return
        with disk_errors(f"reserve {most} bytes for", self._path):
            handle = os.open(self._path, os.O_RDWR)
            try:
                os.posix_fallocate(handle, 0, most)
            finally:
                os.close(handle)
        self._reserved = most

    def _used_bytes(self) -> int:
        """Of the pages that the trees have, without those that are free."""
        with self._errors(), self._env.begin() as read:
            found = [read.stat(tree.db) for tree in self._trees]
        pages = sum(at["branch_pages"] + at["leaf_pages"] + at["overflow_pages"] for at in found)
        return pages * found[0]["psize"]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError as error:
            raise JournalFull(
                f"the index {self._path} is full at {self._map_bytes} bytes; new samples are "
                "refused until there is room: restart with a larger map"
            ) from error
        except lmdb.DiskError as error:
            raise JournalFull(f"no room to write the index {self._path}: {error}") from error
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError) as error:
            raise JournalCorrupt(self._path, 0, str(error)) from error
        except lmdb.VersionMismatchError as error:
            raise JournalError(
                f"the index {self._path} was written by another version of LMDB: {error}"
            ) from error
        except lmdb.Error as error:
            if any(os.strerror(code) in str(error) for code in NO_ROOM):
                raise JournalFull(f"no room to write the index {self._path}: {error}") from error
            raise JournalError(f"the index {self._path} cannot be used: {error}") from error

    # -- snapshot -------------------------------------------------------------------------

    def take_snapshot(self, state: State, position: LogPosition) -> None:
        """Make the state durable as that of `position`. After a failure nothing has changed."""
        ledger = asdict(state.ledger) | {"phases": state.phases()}
        with self._errors(), self._env.begin(write=True) as write:
            self._values.put(write, _POSITION, asdict(position))
            self._values.put(write, _LEDGER, ledger)
            self._values.put(write, _COUNTS, _counts(state))
            self._put_schemas(write, state)
            self._put_kept(write, state)
            self._put_steps(write, state)
            self._put_producers(write, state)
            _put_newest(write, self._ids, state.given_ids)
            _put_newest(write, self._groups, state.ended_groups)
        state.ledger.phases = ledger["phases"]
        state.snapshot_taken()

    def _put_schemas(self, write: "_Transaction", state: State) -> None:
        for number in state.changed.schemas:
            row = schema_row(state.schemas[number])
            self._schemas.put(write, _key(number), row)

    def _put_kept(self, write: "_Transaction", state: State) -> None:
        for number in sorted(state.changed.shelves):
            rows = [kept.row() for kept in state.shelf(number)]
            if rows:
                self._kept.put(write, _key(number), rows)
            else:
                self._kept.delete(write, _key(number))

    def _put_steps(self, write: "_Transaction", state: State) -> None:
        for number in state.changed.steps:
            step = state.steps.get(number)
            if step is None:
                self._steps.delete(write, _key(number))
            else:
                row = [
                    step.digest, step.planned_at, step.micro_batches, step.stage,
                    step.attempt, step.usual_loss,
                ]  # fmt: skip
                self._steps.put(write, _key(number), row)

    def _put_producers(self, write: "_Transaction", state: State) -> None:
        # Names may be longer than LMDB's keys.
        for name in state.changed.producers:
            key = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            producer = state.producers.get(name)
            if producer is None:
                self._producers.delete(write, key)
            else:
                row = [
                    name, producer.floor, sorted(producer.accepted), producer.phase,
                    producer.ended, producer.key, producer.left,
                ]  # fmt: skip
                self._producers.put(write, key, row)

    # -- load -------------------------------------------------------------------------------

    def load(self, state: State) -> LogPosition | None:
        """Fill an empty state; None if there was no snapshot yet."""
        with self._errors(), self._makes_sense(), self._env.begin() as read:
            if read.get(_POSITION, db=self._values.db) is None:
                return None
            self._load_values(read, state)
            _load_newest(read, self._ids, state.given_ids)
            _load_newest(read, self._groups, state.ended_groups)
            if self._values.get(read, _COUNTS) != _counts(state):
                raise ValueError("entries are missing")
            return LogPosition(**self._values.get(read, _POSITION))

    def given_ids(self, state: State) -> tuple[tuple[str, int | None], ...]:
        """The ids that are remembered, with their samples' checksums, oldest first."""
        with self._errors(), self._makes_sense(), self._env.begin() as read:
            stored = _stored(read, self._ids, state.given_ids)
            return (*((given_id, checksum) for given_id, checksum in stored), *state.given_ids.new)

    def ended_groups(self, state: State) -> tuple[tuple[str, str], ...]:
        """The ended groups that are remembered, and why each has, oldest first."""
        with self._errors(), self._makes_sense(), self._env.begin() as read:
            stored = _stored(read, self._groups, state.ended_groups)
            return (*((group_id, why) for group_id, why in stored), *state.ended_groups.new)

    @contextmanager
    def _makes_sense(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError) as error:
            raise JournalCorrupt(self._path, 0, f"its content makes no sense: {error}") from error

    def _load_values(self, read: "_Transaction", state: State) -> None:
        state.ledger = Ledger(**self._values.get(read, _LEDGER))
        for key, value in self._schemas.items(read):
            state.schemas[int.from_bytes(key)] = schema_of(value)
        objects = dict[StoredObject, StoredObject]()
        for _, rows in self._kept.items(read):
            for row in rows:
                state.keep(LiveSample.of(row, objects))
        for key, value in self._steps.items(read):
            step = state.steps[int.from_bytes(key)] = StepRecord(*value)
            for ticket in step.tickets():
                state.kept[ticket].step = int.from_bytes(key)
        for _, (name, floor, accepted, *said) in self._producers.items(read):
            state.producers[name] = ProducerRecord(floor, set(accepted), *said)


class _Tree:
    """One of LMDB's trees; each value is JSON behind a checksum of its own, its key's and its
    tree's, since LMDB has none.
    """

    def __init__(self, name: bytes, db: "_Database") -> None:
        self._name, self.db = name, db

    def put(self, write: "_Transaction", key: bytes, value: object) -> None:
        """Write or overwrite."""
        write.put(key, self.sealed(key, value), db=self.db)

    def delete(self, write: "_Transaction", key: bytes) -> None:
        """Remove if it is there."""
        write.delete(key, db=self.db)

    def get(self, read: "_Transaction", key: bytes) -> Any:
        """Raises ValueError if it is missing or damaged."""
        value = read.get(key, db=self.db)
        if value is None:
            raise ValueError(f"{key.decode()} is missing")
        return self._opened(key, value)

    def items(self, read: "_Transaction") -> Iterator[tuple[bytes, Any]]:
        """Everything, by key. Raises ValueError for what is damaged."""
        return ((key, self._opened(key, value)) for key, value in read.cursor(self.db))

    def sealed(self, key: bytes, value: object) -> bytes:
        """As it is stored."""
        text = _ENCODE(value).encode()
        return self._checksum(key, text) + text

    def _opened(self, key: bytes, value: bytes) -> Any:
        if self._checksum(key, value[4:]) != value[:4]:
            raise ValueError("a value does not match its checksum")
        return json.loads(value[4:])

    def _checksum(self, key: bytes, text: bytes) -> bytes:
        return crc32(text, crc32(key, crc32(self._name))).to_bytes(4)


def _put_newest(write: "_Transaction", tree: _Tree, values: Newest[T]) -> None:
    with write.cursor(tree.db) as cursor:
        found = cursor.first()
        while found and cursor.key() < _key(values.first):
            found = cursor.delete()
        new = (
            (key := _key(at), tree.sealed(key, value))
            for at, value in enumerate(values.new, values.stored)
        )
        cursor.putmulti(new, append=True)


def _load_newest(read: "_Transaction", tree: _Tree, values: Newest[T]) -> None:
    with read.cursor(tree.db) as cursor:
        if cursor.first():
            values.first = int.from_bytes(cursor.key())
        if cursor.last():
            values.stored = int.from_bytes(cursor.key()) + 1


def _stored(read: "_Transaction", tree: _Tree, values: Newest[T]) -> Iterator[Any]:
    """Those in the index that are remembered, oldest first."""
    return (value for key, value in tree.items(read) if key >= _key(values.oldest))


def _counts(state: State) -> dict[str, int]:
    return {
        "kept": len(state.kept),
        "steps": len(state.steps),
        "producers": len(state.producers),
        "schemas": len(state.schemas),
        "ids": len(state.given_ids),
        "groups": len(state.ended_groups),
    }


def _key(number: int) -> bytes:
    return number.to_bytes(8)
