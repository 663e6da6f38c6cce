"""What the journal's tests share: samples, and an open journal that is listened to.

`plain` makes what was remembered comparable.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import Accepted, RecoveredState
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.errors import JournalError
from rollout_dispatcher.journal.journal import Journal
from rollout_dispatcher.journal.policy import SyncPolicy, parse_sync
from rollout_dispatcher.payload import Payload, Reference, StoredObject
from rollout_dispatcher.sample import DType, Field, Sample, Schema

BATCH, OFF = parse_sync("batch"), parse_sync("off")
SCHEMAS = (
    Schema((Field("input_ids", DType.INT64),)),
    Schema((Field("input_ids", DType.INT32), Field("image", DType.UINT8, False, (2, 3)))),
    Schema(
        (
            Field.text("env"),
            Field("input_ids", DType.INT32),
            Field("pixels", DType.UINT8, False, (3,), ragged=True),
        )
    ),
)
OBJECTS = [StoredObject("file:///a", f"p.1/{at}", 1 << 20) for at in range(2)]
#: Wall time minus the core's clock; a power of two keeps the arithmetic exact.
WALL = 2.0**30
PATIENCE = 20.0


def payload_of(ticket: int, nbytes: int) -> memoryview:
    """Bytes that no other ticket has."""
    return memoryview(Random(ticket).randbytes(nbytes))


def checksum_of(given_id: str) -> int:
    """That of the content of the sample of this id."""
    return 2**32 - 1 - len(given_id)


def accepted(
    ticket: int,
    *,
    tokens: int = 4,
    schema: Schema = SCHEMAS[0],
    producer: str = "p",
    given_id: str | None = None,
    group: int = -1,
    version: int | None = None,
    stored: StoredObject | None = None,
    may_be_exempt: bool = True,
) -> Accepted:
    """A sample of its own bytes enters the buffer; stored: it lies in this object."""
    rows = tuple((ticket + at) % 5 for at in range(len(schema.ragged)))
    nbytes = schema.nbytes(tokens, rows)
    payload: Payload = payload_of(ticket, nbytes)
    if stored is not None:
        payload = Reference(stored, 8 * ticket, nbytes)
    sample = Sample(
        given_id or f"s-{ticket}", tokens, tokens // 2, schema, payload,
        None if group < 0 else f"g-{group}", 1 if group < 0 else 2, version, rows,
        may_be_exempt and ticket % 3 == 1, None if given_id is None else checksum_of(given_id),
    )  # fmt: skip
    return Accepted(Entry(sample, ticket, ticket / 8, group), producer, ticket, given_id)


class Listener:
    """Waits for what a journal reports."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.heard = threading.Condition()
        self.durable = 0
        self.syncs = 0
        self.broken: JournalError | None = None
        self.order: list[str] = []
        journal.on_durable = self._on_durable
        journal.on_sync = self._on_sync
        journal.on_broken = self._on_broken

    def wait(self, lsn: int) -> None:
        """Until everything up to `lsn` is durable."""
        with self.heard:
            assert self.heard.wait_for(lambda: self.durable >= lsn, PATIENCE), "not durable"

    def wait_broken(self) -> JournalError:
        with self.heard:
            assert self.heard.wait_for(lambda: self.broken is not None, PATIENCE), "not broken"
        assert self.broken is not None
        return self.broken

    def wait_failing(self) -> JournalError:
        eventually(lambda: self.journal.failure is not None)
        assert self.journal.failure is not None
        return self.journal.failure

    def _on_durable(self, lsn: int) -> None:
        with self.heard:
            assert lsn > self.durable
            self.durable = lsn
            self.order.append("durable")
            self.heard.notify_all()

    def _on_sync(self, seconds: float) -> None:
        with self.heard:
            assert seconds >= 0
            self.syncs += 1
            self.order.append("sync")
            self.heard.notify_all()

    def _on_broken(self, error: JournalError) -> None:
        with self.heard:
            self.broken = error
            self.heard.notify_all()


def eventually(true: Callable[[], bool]) -> None:
    """Wait for what nobody reports."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def open_journal(
    directory: Path, sync: SyncPolicy = OFF, **options: Any
) -> tuple[Journal, RecoveredState]:
    """With small files and a clock of its own."""
    settings = {"map_bytes": 1 << 20, "segment_bytes": 16 << 10, "id_horizon": 100} | options
    return Journal.open(
        directory,
        sync,
        to_wall=lambda time: time + WALL,
        from_wall=lambda time: time - WALL,
        **settings,
    )


@contextmanager
def opened(
    directory: Path, sync: SyncPolicy = OFF, **options: Any
) -> Iterator[tuple[Journal, Listener, RecoveredState]]:
    """An open journal that is closed in the end."""
    journal, remembered = open_journal(directory, sync, **options)
    try:
        yield journal, Listener(journal), remembered
    finally:
        journal.close()


def as_if_killed(directory: Path, to: Path) -> Path:
    """What a process that is killed now would leave: a copy, taken while it runs."""
    shutil.copytree(directory, to)
    return to


def recovered(directory: Path, **options: Any) -> RecoveredState:
    """What a new process is told."""
    journal, remembered = open_journal(directory, **options)
    assert journal.close()
    return remembered


def plain(found: Any) -> Any:
    """All that is remembered, comparable: an entry is equal to no other."""
    match found:
        case Entry():
            sample = found.sample._replace(checksum=None)  # it is kept beside the given id
            return sample, found.ticket, found.arrived, found.group, found.skips, found.producer
        case RecoveredState() | OpenStep():
            return {each.name: plain(getattr(found, each.name)) for each in fields(found)}
        case (StoredObject(), *_):
            return {*found}
        case tuple():
            return [plain(each) for each in found]
    return found
