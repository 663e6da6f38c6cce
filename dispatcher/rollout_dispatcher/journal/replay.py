"""Recovery: replays the log from a snapshot, then loads the payloads.

The log ends at the first block that is not whole. That is a *torn tail* (a crash cut off unsynced
data) or *damage* (synced data is lost). The marks of a segment state up to where it was synced, the
header of the next one that all of it was, and `newest` that there was a next one. A torn tail is
ignored; damage raises JournalCorrupt, before anything on the disk is changed. A block is read at
one place only, behind the one before it, so recovery reads the log since the snapshot once,
whatever payloads contain.

A power cut may lose the last mark, too. Damage to the last blocks synced before it is then
indistinguishable from a torn write, as in any log; after a kill it is reported.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from errno import EIO
from pathlib import Path

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import CostFitted, RecoveredState, SpeedsMeasured
from rollout_dispatcher.core.steps.step import OpenStep, StepState
from rollout_dispatcher.errors import JournalCorrupt, JournalError
from rollout_dispatcher.journal.files.blocks import begins_block, checksum, read_block
from rollout_dispatcher.journal.files.segment import Reader
from rollout_dispatcher.journal.files.segment_header import FIRST_BLOCK
from rollout_dispatcher.journal.files.segments import SegmentFiles
from rollout_dispatcher.journal.index import LogPosition
from rollout_dispatcher.journal.parts import LiveSample, Stage, StepRecord
from rollout_dispatcher.journal.records import Row
from rollout_dispatcher.journal.state import State
from rollout_dispatcher.payload import InJournal, StoredObject
from rollout_planner.cost import Quadratic


@dataclass(frozen=True, slots=True)
class Replayed:
    """end: behind the last whole block. torn: whether a part of a block follows."""

    end: LogPosition
    torn: bool


def replay(state: State, files: SegmentFiles, position: LogPosition, newest: int) -> Replayed:
    """Apply every whole block after `position`. newest: the last segment that has to exist."""
    last = max([newest, *files.sizes])
    while True:
        with files.reader(position.segment) as reader:
            synced, until = reader.synced, None
            if position.segment < last:
                with files.reader(position.segment + 1) as following:
                    synced = until = following.front.after
            end = _replay_segment(state, reader, position, until, synced)
            if end.sequence < synced:
                raise JournalCorrupt(
                    reader.path,
                    end.offset,
                    f"block {end.sequence + 1} was synced and cannot be read",
                )
            if until is None:
                return Replayed(end, begins_block(reader, end.offset, end.sequence + 1))
        position = LogPosition(end.segment + 1, FIRST_BLOCK, end.sequence, end.lsn)


def check_empty(directory: Path, files: SegmentFiles, newest: int) -> None:
    """Raise JournalCorrupt if a segment has blocks, as the empty index is damaged then."""
    for number in sorted({*files.sizes, newest} - {0}):
        with files.reader(number) as reader:
            # `synced` counts the blocks of earlier segments, too.
            if reader.synced > 0 or read_block(reader, FIRST_BLOCK, 1) is not None:
                raise JournalCorrupt(
                    directory / "index", 0, "it has no snapshot, but the segments have blocks"
                )


def _replay_segment(
    state: State, reader: Reader, position: LogPosition, until: int | None, synced: int
) -> LogPosition:
    """Apply the whole blocks of a segment, at most up to the sequence `until`."""
    while until is None or position.sequence < until:
        try:
            block = read_block(reader, position.offset, position.sequence + 1, synced)
            if block is None:
                return position
            state.apply(block.rows, position.segment, iter(block.places))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise JournalCorrupt(
                reader.path, position.offset, f"a block that makes no sense ({error})"
            ) from error
        state.ledger.totals = block.totals
        header = block.header
        offset = position.offset + header.size
        position = LogPosition(position.segment, offset, header.sequence, header.lsn)
    return position


#: Values with the same names in the ledger and in RecoveredState.
_AS_THEY_ARE = (
    "next_ticket", "next_step", "run_id", "generation", "resumed", "saved", "evicted", "dp_size",
    "policy_version", "policy_step", "group_size", "set_by", "ended", "finished", "was_finished",
    "incarnations",
)  # fmt: skip


def recovered_state(
    state: State,
    files: SegmentFiles,
    given_ids: tuple[tuple[str, int | None], ...],
    ended_groups: tuple[tuple[str, str], ...],
    from_wall: Callable[[float], float],
    *,
    payload_bytes: int | None,
) -> RecoveredState:
    """The state for the core, with verified payloads; damaged ones are left in the journal.

    Payloads of steps that were ever committed, and of the youngest buffered samples beyond
    `payload_bytes`, are left there, too: they may be many, and are read on demand.
    """
    entries = _entries(state, files, from_wall, _first(state, payload_bytes))
    ledger = state.ledger

    def steps(*stages: Stage) -> tuple[OpenStep, ...]:
        return tuple(
            _step(number, step, entries, from_wall)
            for number, step in sorted(state.steps.items())
            if step.stage in stages
        )

    buffered = (entries[at] for at, kept in sorted(state.kept.items()) if kept.step < 0)
    return RecoveredState(
        entries=tuple(buffered),
        steps=steps(Stage.OPEN, Stage.REWOUND),
        rewound=any(step.stage == Stage.REWOUND for step in state.steps.values()),
        retained=steps(Stage.RETAINED),
        withdrawn=dict(ledger.withdrawn),
        **{name: getattr(ledger, name) for name in _AS_THEY_ARE},
        cost=None if ledger.cost is None else _cost(ledger.cost),
        speeds=None if ledger.speeds is None else _speeds(ledger.speeds),
        schema=None if ledger.schema is None else state.schemas[ledger.schema],
        phases=tuple(state.phases()),
        producers={
            name: (producer.floor, frozenset(producer.accepted))
            for name, producer in state.producers.items()
        },
        ends={
            name: (producer.phase, producer.ended)
            for name, producer in state.producers.items()
            if producer.phase or producer.ended
        },
        keys={name: producer.key for name, producer in state.producers.items() if producer.key},
        left=frozenset(name for name, producer in state.producers.items() if producer.left),
        given_ids=tuple(given_id for given_id, _ in given_ids),
        checksums=tuple(checksum for _, checksum in given_ids),
        ended_groups=ended_groups,
        totals=json.loads(ledger.totals),
        unneeded=tuple(
            StoredObject(store, key, nbytes)
            for store, objects in ledger.unneeded.items()
            for key, nbytes in objects.items()
        ),
    )


def _cost(row: Row) -> CostFitted:
    version, *coefficients, error, first_step = row
    return CostFitted(version, Quadratic(*coefficients), error, first_step)


def _speeds(row: Row) -> SpeedsMeasured:
    generation, slowness, first_step = row
    return SpeedsMeasured(generation, tuple(slowness), first_step)


def _step(
    number: int, step: StepRecord, entries: dict[int, Entry], from_wall: Callable[[float], float]
) -> OpenStep:
    micro_batches = tuple(
        tuple(tuple(entries[ticket] for ticket in part) for part in rank)
        for rank in step.micro_batches
    )
    return OpenStep(
        number, micro_batches, step.digest, from_wall(step.planned_at),
        StepState.COMMITTED if step.stage == Stage.RETAINED else StepState.PLANNED,
        attempt=step.attempt, usual_loss=step.usual_loss,
        cp_sizes=tuple(map(tuple, step.cp_sizes)),
    )  # fmt: skip


def read_payload(reader: Reader, kept: LiveSample) -> bytes:
    """The payload of a live sample. Raises JournalCorrupt if it is damaged."""
    try:
        payload = reader.read(kept.offset, kept.nbytes)
    except JournalError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == EIO:
            why = f"the payload of sample {kept.sample_id} cannot be read"
            raise JournalCorrupt(reader.path, kept.offset, why) from error
        raise
    if len(payload) != kept.nbytes or checksum(payload, kept.ticket) != kept.checksum:
        raise JournalCorrupt(
            reader.path,
            kept.offset,
            f"the payload of sample {kept.sample_id} does not match its checksum",
        )
    return payload


def _first(state: State, payload_bytes: int | None) -> set[int]:
    """Tickets of the oldest buffered samples whose payloads fit into `payload_bytes`."""
    buffered = (
        kept for _, kept in sorted(state.kept.items()) if kept.step < 0 and kept.stored is None
    )
    if payload_bytes is None:
        return {kept.ticket for kept in buffered}
    found = set()
    for kept in buffered:
        payload_bytes -= kept.nbytes
        if payload_bytes < 0:
            break
        found.add(kept.ticket)
    return found


def _entries(
    state: State, files: SegmentFiles, from_wall: Callable[[float], float], first: set[int]
) -> dict[int, Entry]:
    """All entries by ticket, with payloads in memory of the `first` and of open steps."""
    members: dict[int, list[LiveSample]] = defaultdict(list)
    entries: dict[int, Entry] = {}
    for kept in state.kept.values():
        reference, at = kept.reference, from_wall(kept.arrived)
        if reference is not None:
            entries[kept.ticket] = kept.entry(state.schemas[kept.schema], reference, at)
            continue
        is_open = kept.step >= 0 and state.steps[kept.step].stage == Stage.OPEN
        if not is_open and kept.ticket not in first:
            schema = state.schemas[kept.schema]
            entries[kept.ticket] = kept.entry(schema, InJournal(kept.nbytes), at)
        else:
            members[kept.segment].append(kept)
    for segment in sorted(members):
        with files.reader(segment) as reader:
            for kept in sorted(members[segment], key=lambda kept: kept.offset):
                payload: memoryview | InJournal
                try:
                    payload = memoryview(read_payload(reader, kept))
                except JournalCorrupt:  # this sample is dropped at its delivery
                    payload = InJournal(kept.nbytes)
                schema = state.schemas[kept.schema]
                entries[kept.ticket] = kept.entry(schema, payload, from_wall(kept.arrived))
    return entries
