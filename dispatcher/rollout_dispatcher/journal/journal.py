"""The interface of the journal: append from any thread, callbacks from the journal's own thread.

    append --> queue --> own thread: block, write, sync by policy --> on_durable(lsn)

    RUNNING --no room--> FAILING --room again--> RUNNING
       |                    |
       +---- anything else -+--> BROKEN

The thread writes all queued batches as one block, of up to a quarter of a segment. Invariants:
batches become durable in order, and `on_durable` gets ascending numbers, each after all batches up
to it are durable under the policy; a failing journal drops no batch, but retries every second; a
broken journal writes nothing more, so nothing later can look durable; new samples within `capacity`
never use the last spare, so on a full disk the records that free room (plans, commits, drops) still
fit.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import Self

from rollout_dispatcher.core.facts import Fact, RecoveredState
from rollout_dispatcher.errors import JournalError, JournalFull
from rollout_dispatcher.journal.capacity import Capacity
from rollout_dispatcher.journal.policy import SyncMode, SyncPolicy
from rollout_dispatcher.journal.records import Batch, Encoder, Row
from rollout_dispatcher.journal.state import State
from rollout_dispatcher.journal.store import Store

#: Segments that are compacted after each new one; more than one, so that a backlog shrinks.
MOVES = 4
#: Between two attempts to write without room.
RETRY_SECONDS = 1.0
#: After a reservation that the disk had no room for, until `on_capacity` allows another.
ASK_AGAIN_SECONDS = 10.0


class Trouble(StrEnum):
    """Why nothing more becomes durable."""

    FULL = "full"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """A snapshot. LSNs are those returned by `append`; bytes on disk include preallocated ones.

    errors: number of times that each trouble began.
    """

    durable_lsn: int
    appended_lsn: int
    queued_batches: int
    batches: int
    nbytes: int
    live_bytes: int
    live_samples: int
    segments: int
    torn_tail: bool
    errors: Mapping[Trouble, int] = field(default_factory=dict)


class Journal:
    """One journal directory, and the thread that writes to it. Made by `Journal.open`.

    on_durable (a number), on_broken, on_sync (seconds) and on_capacity are called from that thread
    and must return at once. on_capacity: `capacity` may have enough now, after it fell short.
    failure: why new samples have to be rejected: no room for now, or for good if `broken`.
    """

    def __init__(self, store: Store, policy: SyncPolicy, encoder: Encoder, max_block: int) -> None:
        self.on_durable: Callable[[int], None] = lambda _: None
        self.on_broken: Callable[[JournalError], None] = lambda _: None
        self.on_sync: Callable[[float], None] = lambda _: None
        self.on_capacity: Callable[[], None] = lambda: None
        self.failure: JournalError | None = None
        self.broken = False
        self._store, self._policy, self._encoder = store, policy, encoder
        self._max_block = max_block  # bytes of payloads, but for a single batch
        self._wake = threading.Condition()
        self._queue: deque[Batch] = deque()
        self._errors = dict.fromkeys(Trouble, 0)
        self._closing = False
        self._appended = self._durable = store.lsn
        self._batches = 0
        self._capacity = Capacity(store.capacity)
        # An earlier process may have left the disk full.
        self._set_failure(store.trouble)
        self._retry_due: float | None = None if self.failure is None else monotonic()
        self._ask_again_due: float | None = None
        self._sync_due: float | None = None
        self._statistics = self._observe()
        store.on_sync = self._synced
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        directory: Path,
        sync: SyncPolicy,
        *,
        to_wall: Callable[[float], float],
        from_wall: Callable[[float], float],
        map_bytes: int = 512 << 20,
        segment_bytes: int = 64 << 20,
        id_horizon: int = 1_000_000,
        max_producers: int = 65_536,
        payload_bytes: int | None = None,
    ) -> tuple[Self, RecoveredState]:
        """Open or create a journal; returns it and the recovered state.

        to_wall, from_wall: between the core's clock and wall time. map_bytes: limit of the index.
        segment_bytes: of the largest segments; both grow with the load. id_horizon: ids given by
        users that are kept. payload_bytes: of buffered samples to load, oldest first; payloads
        beyond that stay in the journal (`InJournal`), from which `fetch` reads them.
        Raises JournalError; the directory is unchanged then, but for its creation.
        """
        state = State(id_horizon, max_producers)
        store = Store(
            directory,
            state,
            map_bytes=map_bytes,
            segment_bytes=segment_bytes,
            start_writeback=sync.mode is SyncMode.BATCH,
            from_wall=from_wall,
            payload_bytes=payload_bytes,
        )
        recovered = store.take_recovered()
        return cls(store, sync, Encoder(state.schemas, to_wall), segment_bytes // 4), recovered

    # -- from any thread --------------------------------------------------------------------

    def capacity(self, wanted: int = 0) -> int:
        """Bytes that new samples may take now; 0 while the journal is failing.

        A sample takes its payload and some hundred bytes besides; appended batches count at once,
        durable or not. If this is less than `wanted` (0: the bytes of a block), `on_capacity`
        follows when it may be enough; room for more than a segment is reserved then.
        """
        wanted = wanted or self._max_block
        found = self._capacity.ask(wanted)
        if found < wanted:
            with self._wake:
                self._wake.notify()
        return found

    def append(self, facts: Sequence[Fact], totals: Mapping[str, object]) -> int:
        """Enqueue facts, and the totals after them, as one atomic batch.

        Returns the batch's number; `on_durable` follows. Payloads must not change until then.
        Raises JournalError if the journal is broken or closed, TypeError for totals that are not
        JSON.
        """
        with self._wake:
            if self.broken or self._closing:
                raise self.failure or JournalError("the journal is closed")
            batch = self._encoder.batch(self._appended + 1, facts, totals)
            self._queue.append(batch)
            self._capacity.queue(batch.most)
            self._appended += 1
            self._wake.notify()
            return self._appended

    def fetch(self, ticket: int) -> bytes:
        """Read the payload of a live sample.

        Raises JournalError if the journal does not have it, JournalCorrupt if it is damaged.
        """
        return self._store.fetch(ticket)

    def statistics(self) -> JournalStatistics:
        """The present statistics."""
        return replace(
            self._statistics,
            appended_lsn=self._appended,
            queued_batches=len(self._queue),
            errors=dict(self._errors),
        )

    def close(self, timeout: float = 10.0) -> bool:
        """Write and sync the queue, then release the directory; within `timeout` seconds.

        Returns whether every batch is durable and the thread has ended in order.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)
        written = self._durable == self._appended
        return written and not self.broken and not self._thread.is_alive()

    # -- its own thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._store.close()
        except Exception as error:
            self._break(error)

    def _turn(self) -> bool:
        """Write, sync and retry whatever is due; False at the end."""
        batches = self._take()
        if batches and not self._persist(batches):
            return False
        if self._sync_due is not None and monotonic() >= self._sync_due:
            self._sync_due = None
            if self._store.active.dirty:
                self._store.sync()
        if not self._retry_full():
            return False
        if self._ask_again_due is not None and monotonic() >= self._ask_again_due:
            self._ask_again_due = None
            self.on_capacity()
        self._publish()
        return not self._closing or bool(self._queue)

    def _retry_full(self) -> bool:
        """Try to make room, every second or once segments can be freed; False at the end."""
        in_trouble = self._store.trouble is not None
        if not in_trouble and not self._capacity.wide:
            self._retry_due = None
            return True
        waits = self._retry_due is not None and monotonic() < self._retry_due
        if waits and not self._store.can_free:
            return True
        self._retry_due = monotonic() + RETRY_SECONDS
        if in_trouble:
            self._store.make_room()
            return self._reclaim()
        wanted, self._capacity.wide = self._capacity.wide, 0
        try:
            self._store.reserve(wanted)
        except JournalFull:  # smaller samples still fit
            self._ask_again_due = monotonic() + ASK_AGAIN_SECONDS
        return True

    def _take(self) -> list[Batch]:
        """Wait for batches, or until a sync or a retry is due."""
        with self._wake:
            if not self._queue and not self._closing:
                self._wake.wait(self._next_timeout())
            batches: list[Batch] = []
            left = self._max_block
            while self._queue and (not batches or self._queue[0].nbytes <= left):
                batches.append(self._queue.popleft())
                left -= batches[-1].nbytes
            return batches

    def _next_timeout(self) -> float | None:
        """Seconds until something is due; None if nothing is."""
        retry_due = (self._retry_due or 0.0) if self._capacity.wide else self._retry_due
        times = (self._sync_due, retry_due, self._ask_again_due)
        due = [at for at in times if at is not None]
        return max(0.0, min(due) - monotonic()) if due else None

    def _persist(self, batches: list[Batch]) -> bool:
        rows = [row for batch in batches for row in batch.rows]
        payloads = [payload for batch in batches for payload in batch.payloads]
        last, active = batches[-1], self._store.active.number
        if not self._write(rows, payloads, last.totals, last.lsn):
            return False
        if self._policy.mode is SyncMode.BATCH:
            self._store.sync()
        elif self._policy.mode is SyncMode.INTERVAL and self._sync_due is None:
            self._sync_due = monotonic() + self._policy.interval
        self._batches += len(batches)
        self._durable = last.lsn
        self._publish(sum(batch.most for batch in batches))
        self.on_durable(last.lsn)
        return self._store.active.number == active or self._reclaim()

    def _reclaim(self) -> bool:
        """Compact: move live samples out of nearly empty segments, once per new segment.

        Moves, like new samples, leave the room that plans may need: they use free capacity, or an
        additional segment, as fast producers may leave no capacity.
        """
        for _ in range(MOVES):
            moves = self._store.moves()
            if moves is None:
                break
            batch = Batch(self._store.lsn, *moves, self._store.state.ledger.totals)
            counted = self._capacity.reserve(batch.most, self._store.active.left)
            if not counted and not self._store.has_for_another():
                break
            if not self._write(batch.rows, batch.payloads, batch.totals, batch.lsn):
                return False
            self._publish(batch.most if counted else 0)
        return True

    def _write(self, rows: list[Row], payloads: list[memoryview], totals: str, lsn: int) -> bool:
        return self._retry_until_written(
            lambda: self._store.place(rows, payloads, totals, lsn)
        ) and self._retry_until_written(self._store.flush)

    def _retry_until_written(self, action: Callable[[], None]) -> bool:
        """Perform an action; without room, retry every second. False if closing meanwhile."""
        while True:
            try:
                action()
            except JournalFull as error:
                self._set_failure(error)
                self._capacity.written(0, 0)
            else:
                return True
            with self._wake:
                if self._closing or self._wake.wait_for(lambda: self._closing, RETRY_SECONDS):
                    return False

    def _synced(self, seconds: float) -> None:
        self.on_sync(seconds)

    def _set_failure(self, failure: JournalError | None) -> None:
        """Set `failure`, and count a trouble when it begins."""
        if failure is not None and type(failure) is not type(self.failure):
            self._errors[Trouble.FULL if isinstance(failure, JournalFull) else Trouble.BROKEN] += 1
        self.failure = failure

    def _publish(self, written: int = 0) -> None:
        """Update statistics, failure and capacity; written: bytes that left the queue."""
        self._set_failure(self._store.trouble)
        grown = self._capacity.written(written, self._store.capacity)
        self._statistics = self._observe()
        if grown:
            self.on_capacity()

    def _observe(self) -> JournalStatistics:
        store, live = self._store, self._store.state.live.values()
        return JournalStatistics(
            durable_lsn=self._durable,
            appended_lsn=self._appended,
            queued_batches=len(self._queue),
            batches=self._batches,
            nbytes=store.nbytes,
            live_bytes=sum(part.nbytes for part in live),
            live_samples=sum(part.samples for part in live),
            segments=store.num_segments,
            torn_tail=store.torn_tail,
        )

    def _break(self, error: Exception) -> None:
        if isinstance(error, JournalError):
            failure = error
        else:
            failure = JournalError(f"the journal failed: {type(error).__name__}: {error}")
        with self._wake:
            self._set_failure(failure)
            self._capacity.written(0, 0)
            self.broken = True
            self._queue.clear()
        try:
            self.on_broken(failure)
        finally:
            with suppress(Exception):  # the same error may come again, and is reported already
                self._store.abandon()
