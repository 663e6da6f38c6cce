"""The index: the state as of the last checkpoint, in LMDB.

Invariants: one write transaction is one checkpoint, committed with all of LMDB's syncs; the map
has its full size, and its file that much disk, from opening on, so it is never grown under a view
and never lacks disk; values are copied out (`buffers=False`), so no view outlives its transaction.
Only the journal's one thread uses it, under the journal's own lock.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import lmdb

from dispatcher.errors import JournalCorrupt, JournalError, JournalFull
from dispatcher.journal.disk import disk_errors
from dispatcher.journal.records import Kept, schema_of, schema_row
from dispatcher.journal.state import Ledger, Producer, State, Step

if TYPE_CHECKING:
    _Transaction = lmdb.Transaction[bytes]
    _Database = lmdb._Database  # noqa: SLF001 - the stubs have no other name for it

#: `json.dumps` would make an encoder for each of the many small values.
_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_POSITION, _LEDGER, _COUNTS = b"position", b"ledger", b"counts"


@dataclass(frozen=True, slots=True)
class Position:
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
        with self._errors():
            self._env = lmdb.open(
                str(path), map_size=map_bytes, subdir=False, max_dbs=8, lock=False, mode=0o600
            )
        try:
            self._check_size()
            with self._errors():
                self._values, self._schemas, self._kept, self._steps, self._producers, self._ids = (
                    self._env.open_db(name)
                    for name in (b"values", b"schemas", b"kept", b"steps", b"producers", b"ids")
                )
            self._reserve()
        except JournalError:
            self._env.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return self._map_bytes

    def close(self) -> None:
        """Let go of the file."""
        self._env.close()

    def _check_size(self) -> None:
        """Touching a page that the file does not have would kill the process."""
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if (size := self._path.stat().st_size) < needed:
            raise JournalCorrupt(self._path, size, f"it ends there and should have {needed} bytes")

    def _reserve(self) -> None:
        with disk_errors(f"reserve {self._map_bytes} bytes for", self._path):
            handle = os.open(self._path, os.O_RDWR)
            try:
                os.posix_fallocate(handle, 0, self._map_bytes)
            finally:
                os.close(handle)

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
            raise JournalError(f"the index {self._path} cannot be used: {error}") from error

    # -- checkpoint -------------------------------------------------------------------------

    def checkpoint(self, state: State, position: Position) -> None:
        """Make the state durable as that of `position`. After a failure nothing has changed."""
        ledger = asdict(state.ledger) | {"phases": state.phases()}
        with self._errors(), self._env.begin(write=True) as write:
            write.put(_POSITION, _sealed(asdict(position)), db=self._values)
            write.put(_LEDGER, _sealed(ledger), db=self._values)
            write.put(_COUNTS, _sealed(_counts(state)), db=self._values)
            self._put_schemas(write, state)
            self._put_kept(write, state)
            self._put_steps(write, state)
            self._put_producers(write, state)
            self._put_ids(write, state)
        state.ledger.phases = ledger["phases"]
        state.checkpointed()

    def _put_schemas(self, write: "_Transaction", state: State) -> None:
        for number in state.changed.schemas:
            row = schema_row(state.schemas[number])
            write.put(_key(number), _sealed(row), db=self._schemas)

    def _put_kept(self, write: "_Transaction", state: State) -> None:
        for number in sorted(state.changed.shelves):
            rows = [kept.row() for kept in state.shelf(number)]
            if rows:
                write.put(_key(number), _sealed(rows), db=self._kept)
            else:
                write.delete(_key(number), db=self._kept)

    def _put_steps(self, write: "_Transaction", state: State) -> None:
        for number in state.changed.steps:
            step = state.steps.get(number)
            if step is None:
                write.delete(_key(number), db=self._steps)
            else:
                row = [step.digest, step.planned_at, step.micro_batches, step.stage]
                write.put(_key(number), _sealed(row), db=self._steps)

    def _put_producers(self, write: "_Transaction", state: State) -> None:
        # Names may be longer than LMDB's keys.
        for name in state.changed.producers:
            key = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            producer = state.producers.get(name)
            if producer is None:
                write.delete(key, db=self._producers)
            else:
                row = [
                    name, producer.floor, sorted(producer.accepted), producer.phase,
                    producer.ended,
                ]  # fmt: skip
                write.put(key, _sealed(row), db=self._producers)

    def _put_ids(self, write: "_Transaction", state: State) -> None:
        with write.cursor(self._ids) as cursor:
            found = cursor.first()
            while found and cursor.key() < _key(state.first_id):
                found = cursor.delete()
            new = (
                (_key(at), _sealed(id_)) for at, id_ in enumerate(state.given_ids, state.stored_ids)
            )
            cursor.putmulti(new, append=True)

    # -- load -------------------------------------------------------------------------------

    def load(self, state: State) -> Position | None:
        """Fill an empty state; None if there was no checkpoint yet."""
        with self._errors(), self._env.begin() as read:
            found = read.get(_POSITION, db=self._values)
            if found is None:
                return None
            try:
                self._load_values(read, state)
                self._load_ids(read, state)
                if _opened(read.get(_COUNTS, db=self._values)) != _counts(state):
                    raise ValueError("entries are missing")
                return Position(**_opened(found))
            except (ValueError, TypeError, KeyError) as error:
                raise JournalCorrupt(
                    self._path, 0, f"its content makes no sense: {error}"
                ) from error

    def given_ids(self, first: int) -> list[str]:
        """The remembered ids from that number on, oldest first."""
        with self._errors(), self._env.begin() as read:
            return [_opened(value) for key, value in read.cursor(self._ids) if key >= _key(first)]

    def _load_values(self, read: "_Transaction", state: State) -> None:
        state.ledger = Ledger(**_opened(read.get(_LEDGER, db=self._values)))
        for key, value in read.cursor(self._schemas):
            state.schemas[int.from_bytes(key)] = schema_of(_opened(value))
        for value in _values(read, self._kept):
            for row in _opened(value):
                state.keep(Kept(*row))
        for key, value in read.cursor(self._steps):
            step = state.steps[int.from_bytes(key)] = Step(*_opened(value))
            for ticket in step.tickets():
                state.kept[ticket].step = int.from_bytes(key)
        for value in _values(read, self._producers):
            name, floor, accepted, phase, ended = _opened(value)
            state.producers[name] = Producer(floor, set(accepted), phase, ended)

    def _load_ids(self, read: "_Transaction", state: State) -> None:
        with read.cursor(self._ids) as cursor:
            if cursor.first():
                state.first_id = int.from_bytes(cursor.key())
            if cursor.last():
                state.stored_ids = int.from_bytes(cursor.key()) + 1


def _values(read: "_Transaction", db: "_Database") -> Iterable[bytes]:
    return (value for _, value in read.cursor(db))


def _counts(state: State) -> dict[str, int]:
    return {
        "kept": len(state.kept),
        "steps": len(state.steps),
        "producers": len(state.producers),
        "schemas": len(state.schemas),
    }


def _key(number: int) -> bytes:
    return number.to_bytes(8)


def _sealed(value: object) -> bytes:
    """JSON behind its checksum: LMDB has none."""
    text = _ENCODE(value).encode()
    return crc32(text).to_bytes(4) + text


def _opened(value: bytes | None) -> Any:
    if value is None or crc32(value[4:]) != int.from_bytes(value[:4]):
        raise ValueError("a value is missing or does not match its checksum")
    return json.loads(value[4:])
