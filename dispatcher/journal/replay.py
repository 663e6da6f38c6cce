"""Recovery: from a checkpoint forward through the log, and then the payloads.

The log ends at the first block that is not whole. Whether that is a *torn tail* (a crash cut off
what nobody was told of) or *damage* is decided by what lies behind: a later block that was written
when the broken one was already synced, or a later segment, proves that it was whole once. A torn
tail is ignored; damage raises JournalCorrupt, and nothing on the disk has been changed then.
Damage to the very last block before a crash cannot be told from a torn write, as in any log.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dispatcher.core.entry import Entry
from dispatcher.core.facts import Remembered, RememberedStep
from dispatcher.errors import JournalCorrupt
from dispatcher.journal.blocks import Header, begins_block, checksum, later_headers, read_block
from dispatcher.journal.index import Position
from dispatcher.journal.records import Kept
from dispatcher.journal.segments import FIRST_BLOCK, Reader, SegmentFiles
from dispatcher.journal.state import Stage, State, Step


@dataclass(frozen=True, slots=True)
class Replayed:
    """end: behind the last whole block. torn: whether something that is not whole came then."""

    end: Position
    torn: bool


def replay(state: State, files: SegmentFiles, position: Position) -> Replayed:
    """Apply every whole block after `position`."""
    broken_at = position
    while True:
        data = _content(files, position.segment)
        end = _replay_segment(state, data, files, position)
        if end.sequence > position.sequence or position == broken_at:
            broken_at = end
        if any(header.synced > end.sequence for header in _later(data, end)):
            raise _damage(files, broken_at)
        following = end.segment + 1
        if following not in files.sizes:
            break
        position = Position(following, FIRST_BLOCK, end.sequence, end.lsn)
    _check_nothing_later(files, end)
    return Replayed(end, begins_block(data, end.offset, end.segment))


def has_blocks(files: SegmentFiles, segment: int) -> bool:
    """Whether anything was ever written to this segment."""
    return next(later_headers(_content(files, segment), FIRST_BLOCK, segment), None) is not None


def _content(files: SegmentFiles, segment: int) -> bytes:
    with files.reader(segment) as reader:
        return reader.read(0, reader.size)


def _later(data: bytes, end: Position) -> Iterator[Header]:
    return later_headers(data, end.offset, end.segment)


def _replay_segment(state: State, data: bytes, files: SegmentFiles, position: Position) -> Position:
    view = memoryview(data)
    while True:
        segment, offset = position.segment, position.offset
        try:
            block = read_block(view, offset, segment)
            if block is None or block.header.sequence != position.sequence + 1:
                return position
            state.apply(block.rows, segment, iter(block.places))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise JournalCorrupt(
                files.path(segment), offset, f"a block that makes no sense ({error})"
            ) from error
        state.ledger.totals = block.totals
        header = block.header
        position = Position(segment, offset + header.size, header.sequence, header.lsn)


def _check_nothing_later(files: SegmentFiles, end: Position) -> None:
    """A block in a later segment proves that the log once went on to there."""
    for segment in sorted(number for number in files.sizes if number > end.segment):
        if any(
            header.synced > end.sequence
            for header in later_headers(_content(files, segment), 0, segment)
        ):
            raise JournalCorrupt(files.path(end.segment + 1), 0, "the file is missing")


def _damage(files: SegmentFiles, at: Position) -> JournalCorrupt:
    return JournalCorrupt(
        files.path(at.segment),
        at.offset,
        f"block {at.sequence + 1} was synced and cannot be read",
    )


def remembered(
    state: State,
    files: SegmentFiles,
    given_ids: tuple[str, ...],
    totals: dict[str, object],
    from_wall: Callable[[float], float],
) -> Remembered:
    """The state as the core wants it, with every payload read and verified.

    But for steps that were ever committed: those may be many, and are read when they are wanted.
    """
    entries = _entries(state, files, from_wall)
    ledger = state.ledger

    def steps(*stages: Stage) -> tuple[RememberedStep, ...]:
        return tuple(
            _step(number, step, entries, from_wall)
            for number, step in sorted(state.steps.items())
            if step.stage in stages
        )

    buffered = (entries[at] for at, kept in sorted(state.kept.items()) if kept.step < 0)
    return Remembered(
        entries=tuple(buffered),
        steps=steps(Stage.OPEN, Stage.REWOUND),
        retained=steps(Stage.RETAINED),
        next_ticket=ledger.next_ticket,
        next_step=ledger.next_step,
        run_id=ledger.run_id,
        generation=ledger.generation,
        resumed=ledger.resumed,
        saved=ledger.saved,
        dp_size=ledger.dp_size,
        policy_version=ledger.policy_version,
        policy_step=ledger.policy_step,
        phases=tuple(state.phases()),
        ended=ledger.ended,
        producers={
            name: (producer.floor, frozenset(producer.accepted))
            for name, producer in state.producers.items()
        },
        words={
            name: (producer.phase, producer.ended)
            for name, producer in state.producers.items()
            if producer.phase or producer.ended
        },
        given_ids=given_ids,
        totals=totals,
    )


def _step(
    number: int, step: Step, entries: dict[int, Entry], from_wall: Callable[[float], float]
) -> RememberedStep:
    micro_batches = tuple(
        tuple(tuple(entries[ticket] for ticket in part) for part in rank)
        for rank in step.micro_batches
    )
    at = from_wall(step.planned_at)
    return RememberedStep(number, step.digest, at, micro_batches, step.stage == Stage.REWOUND)


def read_payload(reader: Reader, kept: Kept) -> bytes:
    """A kept sample's payload. Raises JournalCorrupt if it is not what was written."""
    payload = reader.read(kept.offset, kept.nbytes)
    if len(payload) != kept.nbytes or checksum(payload, kept.ticket) != kept.checksum:
        raise JournalCorrupt(
            reader.path,
            kept.offset,
            f"the payload of sample {kept.sample_id} does not match its checksum",
        )
    return payload


def _entries(
    state: State, files: SegmentFiles, from_wall: Callable[[float], float]
) -> dict[int, Entry]:
    members: dict[int, list[Kept]] = defaultdict(list)
    entries: dict[int, Entry] = {}
    for kept in state.kept.values():
        if kept.step >= 0 and state.steps[kept.step].stage != Stage.OPEN:
            schema = state.schemas[kept.schema]
            entries[kept.ticket] = kept.entry(schema, memoryview(b""), from_wall(kept.arrived))
        else:
            members[kept.segment].append(kept)
    for segment in sorted(members):
        with files.reader(segment) as reader:
            for kept in sorted(members[segment], key=lambda kept: kept.offset):
                payload = memoryview(read_payload(reader, kept))
                schema = state.schemas[kept.schema]
                entries[kept.ticket] = kept.entry(schema, payload, from_wall(kept.arrived))
    return entries
