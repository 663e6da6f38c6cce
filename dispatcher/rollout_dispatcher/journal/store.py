"""Log and index together, without a thread.

`place` and `flush` append one block and apply it to the state; `sync` makes the log durable; a full
segment is followed by a snapshot and the next segment. Invariants: the index is never ahead of the
durable log; a segment is freed only after a snapshot that needs neither its payloads nor its
blocks; the disk used is bounded by the live bytes, not by their age, plus a few segments; `trouble`
is set while new samples have to be rejected though the log still works.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
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
from rollout_dispatcher.journal.replay import check_empty, read_payload, recovered_state, replay
from rollout_dispatcher.journal.state import State

#: Segments beyond twice the live bytes that are not compacted.
_SLACK_SEGMENTS = 4


class Store:
    """An open journal directory. Raises JournalError if it cannot be opened; nothing is lost then.

    start_writeback: a sync follows each block, so the disk may begin before it. active: the segment
    that is written to. on_sync: called with the seconds of each sync of the log.
    """

    active: Segment

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
        self.on_sync: Callable[[float], None] = lambda _: None
        self.state = state
        self._start_writeback = start_writeback
        #: Head, bytes and LSN of a block that is in the state, and not yet in the log.
        self._unwritten: tuple[memoryview, int, int] | None = None
        self._index_trouble: JournalFull | None = None
        self._spare_trouble: JournalFull | None = None
        with ExitStack() as undo:
            self._directory = undo.enter_context(closing(Directory(directory)))
            self._index = undo.enter_context(closing(Index(directory / "index", map_bytes)))
            self._files = SegmentFiles(directory, segment_bytes)
            end = self._recover(directory)
            self._recovered: RecoveredState | None = recovered_state(
                state, self._files, self._index.given_ids(state), self._index.ended_groups(state),
                from_wall, payload_bytes=payload_bytes,
            )  # fmt: skip
            self.active = self._activate_after(end)
            undo.callback(self._close_active)
            self.make_room()
            if self._begun_at is None and self._index_trouble is not None:
                raise self._index_trouble
            self._release = undo.pop_all()

    def _close_active(self) -> None:
        self.active.close()

    def take_recovered(self) -> RecoveredState:
        """The state on opening; once, so that the store keeps no payloads."""
        recovered, self._recovered = self._recovered, None
        assert recovered is not None
        return recovered

    # -- opening ----------------------------------------------------------------------------

    def _recover(self, directory: Path) -> LogPosition:
        """Bring the state up to the end of the log; returns that end."""
        position = self._begun_at = self._index.load(self.state)
        begun = position is not None or bool(self._files.sizes)
        self._newest = NewestSegment(directory, begun=begun)
        self.torn_tail = False
        if position is None:
            check_empty(directory, self._files, self._newest.number)
            return LogPosition(0, 0, 0, 0)
        replayed = replay(self.state, self._files, position, self._newest.number)
        self.torn_tail = replayed.torn
        # A killed process may not have synced the blocks that the next snapshot counts as durable.
        for number in range(position.segment, replayed.end.segment + 1):
            with self._files.reader(number) as reader:
                reader.sync()
        for number in self.state.live:  # raises if one is missing, or was cut
            self._files.reader(number).close()
        return replayed.end

    def _activate_after(self, end: LogPosition) -> Segment:
        """Begin a new segment, so that a torn block is never taken for its successor.

        On a full disk resume the last one with another salt, as a restart must not use up spares.
        """
        self.sequence, self.lsn = end.sequence, end.lsn
        if end.segment and not self._files.has_for_another():
            with suppress(JournalFull):
                self._index.take_snapshot(self.state, end)
                return self._files.resume(end.segment, end.offset)
        newest = max([*self._files.sizes, end.segment, self._newest.number])
        return self._begin(newest + 1, 0)

    def _begin(self, number: int, capacity: int) -> Segment:
        """Begin a segment after the synced blocks; it is named before it is written to."""
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
        """The payload of a live sample; from any thread. Raises JournalError."""
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
                # The writer has moved it meanwhile, and may have reused the segment.

    # -- writing ----------------------------------------------------------------------------

    @property
    def trouble(self) -> JournalFull | None:
        """The error that will stop the journal soon, though the log still works."""
        return self._index_trouble or self._spare_trouble

    @property
    def can_free(self) -> bool:
        """Whether a snapshot would free segments of a full disk."""
        if self._spare_trouble is None or self._index_trouble is not None:
            return False
        live, active = self.state.live, self.active.number
        return any(number < active and number not in live for number in self._files.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return self._files.nbytes + self._index.nbytes

    @property
    def num_segments(self) -> int:
        """Segments, the active one included."""
        return len(self._files.sizes)

    @property
    def capacity(self) -> int:
        """Bytes of new samples that the log takes and still has a spare for other records.

        However they are cut into blocks: they fit into the rest of this segment, or the next one.
        """
        return 0 if self.trouble else max(self.active.left, self._files.capacity)

    def has_for_another(self) -> bool:
        """Whether a block may begin another segment without a loss of `capacity`."""
        usual = self.active.left <= self._files.capacity <= self._files.segment_bytes
        return usual and not self.trouble and self._files.has_for_another()

    def reserve(self, capacity: int) -> None:
        """Have a spare for a sample that is larger than a segment. Raises JournalFull."""
        self._files.ensure_spares(capacity)

    def place(self, rows: list[Row], payloads: list[memoryview], totals: str, lsn: int) -> None:
        """Write a block's payloads and apply its rows to the state; `flush` must follow.

        Raises JournalFull without room; nothing has changed then. Raises JournalError for rows that
        contradict the state.
        """
        assert self._unwritten is None
        block = draft(rows, payloads, totals)
        size = block.head_bytes + block.payload_bytes
        if size > self.active.left:
            self._roll(size)
        active = self.active
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
        head = block.head(active.front, active.end, self.sequence + 1, lsn)
        self._unwritten = head, size, lsn

    def flush(self) -> None:
        """Write the head of the placed block. Raises JournalFull; call again then."""
        assert self._unwritten is not None
        head, size, lsn = self._unwritten
        self.active.append(head, size)
        self._unwritten = None
        self.sequence, self.lsn = self.sequence + 1, lsn

    def sync(self) -> None:
        """Make all written blocks durable."""
        begun = perf_counter()
        self.active.sync(self.sequence)
        self.on_sync(perf_counter() - begun)

    def close(self) -> None:
        """Sync, take a snapshot if there is room for one, and release the directory."""
        with self._release:
            if self._unwritten is None:
                self._take_snapshot()

    def abandon(self) -> None:
        """Release the directory without writing anything more."""
        self._release.close()

    # -- space ------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Take a snapshot, free segments, allocate spares; a failure becomes `trouble`."""
        self._take_snapshot()
        self._ensure_spares()

    def moves(self) -> tuple[list[Row], list[memoryview]] | None:
        """Rows and payloads that move the samples of the emptiest segment; None if not worthwhile.

        Else segments with a few long-lived samples each would add up. The active segment and those
        with damaged payloads are excluded. Raises JournalError.
        """
        files, live = self._files, self.state.live
        excluded = {self.active.number, *files.damaged}
        held = [number for number in live if number not in excluded]
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
        following = self._begin(self.active.number + 1, capacity)
        self.active.close()
        self.active = following
        self._files.grow()
        self._ensure_spares()

    def _take_snapshot(self) -> None:
        active = self.active
        if active.dirty:
            self.sync()
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
