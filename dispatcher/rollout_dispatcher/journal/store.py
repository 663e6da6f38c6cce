"""The store: log and index as one thing, without a thread of its own.

`write` appends one block and applies it to the state; `sync` makes the log durable; when a segment
is full the next one begins and a snapshot follows. Invariants: the index is never ahead of what
is durable in the log; a segment is freed only after a snapshot that needs neither its payloads
nor its blocks; the disk used is bounded by what is live, not by how long it lives, but for a few
segments; `trouble` says what stands in the way of new samples while the log still goes on.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from rollout_dispatcher.core.facts import RecoveredState
from rollout_dispatcher.errors import JournalCorrupt, JournalError, JournalFull
from rollout_dispatcher.journal.files.blocks import draft, places
from rollout_dispatcher.journal.files.directory import Directory, NewestSegment
from rollout_dispatcher.journal.files.segment import Segment
from rollout_dispatcher.journal.files.segments import SegmentFiles
from rollout_dispatcher.journal.index import Index, LogPosition
from rollout_dispatcher.journal.records import MOVED, Row
from rollout_dispatcher.journal.replay import check_empty, read_payload, remembered, replay
from rollout_dispatcher.journal.state import State

#: Segments beyond twice the live bytes that are left alone.
_SLACK_SEGMENTS = 4


class Store:
    """An open journal directory. Raises JournalError if it cannot be opened; nothing is lost then.

    start_writeback: whether a sync follows each block, so that the disk may begin before it.
    on_sync: told how many seconds each sync of the log took.
    """

    def __init__(
        self,
        directory: Path,
        state: State,
        *,
        map_bytes: int,
        segment_bytes: int,
        start_writeback: bool,
        from_wall: Callable[[float], float],
        payload_bytes: int | None,
    ) -> None:
        self.on_sync: Callable[[float], None] = _ignore
        self.state = state
        self._start_writeback = start_writeback
        self._unwritten: _Unwritten | None = None
        self._index_trouble: JournalFull | None = None
        self._spare_trouble: JournalFull | None = None
        with ExitStack() as undo:
            self._directory = undo.enter_context(closing(Directory(directory)))
            self._index = undo.enter_context(closing(Index(directory / "index", map_bytes)))
            self._files = SegmentFiles(directory, segment_bytes)
            end = self._recover(directory)
            self._taken: RecoveredState | None = remembered(
                state, self._files, self._index.given_ids(state), self._index.ended_groups(state),
                from_wall, payload_bytes=payload_bytes,
            )  # fmt: skip
            self._active = self._activate_after(end)
            undo.callback(self._close_active)
            self.tend()
            if self._begun_at is None and self._index_trouble is not None:
                raise self._index_trouble
            self._release = undo.pop_all()

    def _close_active(self) -> None:
        self._active.close()

    def take_remembered(self) -> RecoveredState:
        """What was there on opening; once, so that its payloads are not held on to."""
        remembered, self._taken = self._taken, None
        assert remembered is not None
        return remembered

    # -- opening ----------------------------------------------------------------------------

    def _recover(self, directory: Path) -> LogPosition:
        """Bring the state up to the end of the log; returns that end."""
        position = self._begun_at = self._index.load(self.state)
        begun = position is not None or bool(self._files.sizes)
        self._newest = NewestSegment.find(directory, begun=begun)
        self.torn_tail = False
        if position is None:
            check_empty(directory, self._files, self._newest.number)
            return LogPosition(0, 0, 0, 0)
        replayed = replay(self.state, self._files, position, self._newest.number)
        self.torn_tail = replayed.torn
        # A killed process may have left to the system what the next snapshot says is durable.
        self._files.sync(range(position.segment, replayed.end.segment + 1))
        self._files.check(self.state.live)
        return replayed.end

    def _activate_after(self, end: LogPosition) -> Segment:
        """A new segment, so that nothing torn can ever be taken for its successor.

        On a full disk the last one, with another salt: a restart must not use the spares up.
        """
        self.sequence, self.lsn = end.sequence, end.lsn
        if end.segment and not self._files.has_for_another():
            with suppress(JournalFull):
                self._index.take_snapshot(self.state, end)
                return self._files.resume(end.segment, end.offset)
        newest = max([*self._files.sizes, end.segment, self._newest.number])
        return self._begin(newest + 1, 0)

    def _begin(self, number: int, capacity: int) -> Segment:
        """A new segment for what comes after what is synced; named before it is written to."""
        self._directory.check_is_there()
        segment = self._files.activate(number, capacity, self.sequence)
        try:
            self._newest.name(number)
        except JournalError:
            segment.close()
            self._files.free(number)
            raise
        return segment

    def fetch(self, ticket: int) -> bytes:
        """The payload of a kept sample; from any thread. Raises JournalError."""
        kept = self.state.kept.get(ticket)
        if kept is None:
            raise JournalError(f"the journal does not keep sample {ticket}; this is a bug")
        while True:
            place = kept.segment, kept.offset
            try:
                with self._files.reader(kept.segment) as reader:
                    return read_payload(reader, kept)
            except JournalError:
                if place == (kept.segment, kept.offset):
                    raise
                # The writer has moved it meanwhile, and may have used the segment again.

    # -- writing ----------------------------------------------------------------------------

    @property
    def trouble(self) -> JournalFull | None:
        """What will stop the journal before long, though the log still goes on."""
        return self._index_trouble or self._spare_trouble

    @property
    def can_free(self) -> bool:
        """Whether a snapshot would make room on a disk that is full."""
        if self._spare_trouble is None or self._index_trouble is not None:
            return False
        live, active = self.state.live, self._active.number
        return any(number < active and number not in live for number in self._files.sizes)

    @property
    def dirty(self) -> bool:
        """Whether something is written and not synced."""
        return self._active.dirty

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return self._files.nbytes + self._index.nbytes

    @property
    def active(self) -> int:
        """Number of the segment that is written to."""
        return self._active.number

    @property
    def num_segments(self) -> int:
        """Segments, the active one included."""
        return len(self._files.sizes)

    @property
    def capacity(self) -> int:
        """Bytes of new samples that the log takes and still has a spare for what is no sample.

        However they are cut into blocks: they go into what is left of this segment, or those that
        do not into the next one.
        """
        return 0 if self.trouble else max(self.left, self._files.capacity)

    @property
    def left(self) -> int:
        """Bytes of blocks that this segment still takes."""
        return self._active.size - self._active.end

    def has_for_another(self) -> bool:
        """Whether a block may begin another segment and `capacity` stays what it is."""
        usual = self.left <= self._files.capacity <= self._files.segment_bytes
        return usual and not self.trouble and self._files.has_for_another()

    def reserve(self, capacity: int) -> None:
        """Make room for a sample that is larger than a segment. Raises JournalFull."""
        self._files.ensure_spares(capacity)

    def place(self, rows: list[Row], payloads: list[memoryview], totals: str, lsn: int) -> None:
        """Give a block its place in the log and apply it; `flush` must follow.

        Raises JournalFull when there is no room for it; nothing has changed then. Raises
        JournalError for rows that contradict what is kept.
        """
        assert self._unwritten is None
        block = draft(rows, payloads, totals)
        size = block.head_bytes + block.payload_bytes
        if self._active.end + size > self._active.size:
            self._roll(size)
        active, sequence = self._active, self.sequence + 1
        start = active.end + block.head_bytes
        active.write_ahead(start, block.padded())
        if self._start_writeback:
            active.start_writeback(start, block.payload_bytes)
        block.sum_up()
        try:
            self.state.apply(rows, active.number, places(rows, start))
        except (ValueError, TypeError, KeyError) as error:
            raise JournalError(f"facts contradict the journal: {error}; this is a bug") from error
        self.state.ledger.totals = totals
        head = block.head(active.front, active.end, sequence, lsn)
        self._unwritten = _Unwritten(head, size, sequence, lsn)

    def flush(self) -> None:
        """Write the block that was placed. Raises JournalFull; call again then."""
        block = self._unwritten
        assert block is not None
        self._active.append(block.head, block.size)
        self._unwritten = None
        self.sequence, self.lsn = block.sequence, block.lsn

    def sync(self) -> None:
        """Make what was written durable."""
        begun = perf_counter()
        self._active.sync(self.sequence)
        self.on_sync(perf_counter() - begun)

    def close(self) -> None:
        """Sync, leave a snapshot if there is room for one, and let go."""
        with self._release:
            if self._unwritten is None:
                self._take_snapshot()

    def abandon(self) -> None:
        """Let go without writing anything more."""
        self._release.close()

    # -- space ------------------------------------------------------------------------------

    def tend(self) -> None:
        """Take a snapshot, free what nobody needs, have spares; what fails is `trouble`."""
        self._take_snapshot()
        self._ensure_spares()

    def moves(self) -> tuple[list[Row], list[memoryview]] | None:
        """The samples of the emptiest segment, to be placed again, if space is wasted on them.

        Segments that hold a few long-lived samples each would add up. The active one is left alone,
        as one is with damaged payloads. Raises JournalError.
        """
        files, live = self._files, self.state.live
        left_alone = {self._active.number, *files.damaged}
        held = [number for number in live if number not in left_alone]
        slack = _SLACK_SEGMENTS * files.segment_bytes
        if sum(files.sizes[number] for number in held) <= 2 * self.state.live_bytes + slack:
            return None
        emptiest = min(held, key=lambda number: live[number].nbytes)
        members = [kept for kept in self.state.kept.values() if kept.segment == emptiest]
        try:
            with files.reader(emptiest) as reader:
                payloads = [memoryview(read_payload(reader, kept)) for kept in members]
        except JournalCorrupt:
            files.damaged.add(emptiest)
            return None
        return [[MOVED, kept.ticket, kept.nbytes, 0] for kept in members], payloads

    def _roll(self, capacity: int) -> None:
        """Begin the next segment. Raises JournalFull; nothing has changed then."""
        self._take_snapshot()
        following = self._begin(self._active.number + 1, capacity)
        self._active.close()
        self._active = following
        self._files.grow()
        self._ensure_spares()

    def _take_snapshot(self) -> None:
        if self._active.dirty:
            self.sync()
        active = self._active
        position = LogPosition(active.number, active.end, self.sequence, self.lsn)
        try:
            self._index.take_snapshot(self.state, position)
        except JournalFull as error:
            self._index_trouble = error
            return
        self._index_trouble = None
        for number in [number for number in self._files.sizes if number < active.number]:
            if number not in self.state.live:
                self._files.free(number)

    def _ensure_spares(self) -> None:
        try:
            self._files.ensure_spares()
            self._index.reserve(self._files.next_bytes)
        except JournalFull as error:
            self._spare_trouble = error
        else:
            self._spare_trouble = None


@dataclass(frozen=True, slots=True)
class _Unwritten:
    """A block that the state has and the log has not."""

    head: memoryview
    size: int
    sequence: int
    lsn: int


def _ignore(seconds: float) -> None:
    """What `on_sync` is until somebody wants to know."""
