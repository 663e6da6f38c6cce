"""The journal as its user sees it: append from one thread, hear from another what is durable.

    append --> queue --> its own thread: block, write, sync as the policy says --> on_durable(lsn)

    RUNNING --no room--> FAILING --room again--> RUNNING
       |                    |
       +---- anything else -+--> BROKEN

Everything that is queued when the thread comes by becomes one block, up to a quarter of a segment.
Invariants: batches become durable in order, and `on_durable` is told ascending numbers, each after
all batches up to it are durable under the policy; a batch is never dropped while the journal is
failing, it waits and is tried every second; a broken journal writes nothing more, so nothing later
can look durable; as long as new samples keep to `capacity`, they never touch the last spare, so
that what frees room again (plans, commits, drops) finds some on a full disk.
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

#: Segments that are emptied after each new one; more than one, so that a backlog shrinks.
MOVES = 4
#: How often something that had no room is tried again.
RETRY_SECONDS = 1.0
#: When who wanted more than the disk has is told to ask again; until then nothing is tried.
ASK_AGAIN_SECONDS = 10.0


class Trouble(StrEnum):
    """Why nothing more became durable."""

    FULL = "full"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """A snapshot. LSNs are as `append` returned them; bytes are on disk, preallocated ones too.

    errors: how often each trouble began.
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

    on_durable, on_broken, on_sync and on_capacity are called from that thread: hand over and
    return. on_capacity: there may be as much now as `capacity` was asked for and fell short of.
    failure: why new samples are to be refused: no room for now, or `broken` for good.
    """

    def __init__(self, store: Store, policy: SyncPolicy, encoder: Encoder, max_block: int) -> None:
        self.on_durable: Callable[[int], None] = _ignore
        self.on_broken: Callable[[JournalError], None] = _ignore
        self.on_sync: Callable[[float], None] = _ignore
        self.on_capacity: Callable[[], None] = _do_nothing
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
        # What an earlier process ended with may still be in the way, before anything is written.
        self._set_failure(store.trouble)
        self._tend_due: float | None = None if self.failure is None else monotonic()
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
        """Open or create a journal; returns it and what it remembers.

        to_wall, from_wall: between the core's clock and wall time. map_bytes: the index's limit.
        segment_bytes: of a segment at its largest; both grow with what comes. id_horizon: ids given
        by users that are remembered.
        payload_bytes: of the buffered samples, oldest first; what exceeds it is left in the journal
        (`InJournal`), where `fetch` reads it.
        Raises JournalError; nothing in the directory was changed then, but for its creation.
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
        remembered = store.take_remembered()
        return cls(store, sync, Encoder(state.schemas, to_wall), segment_bytes // 4), remembered

    # -- from any thread --------------------------------------------------------------------

    def capacity(self, wanted: int = 0) -> int:
        """Bytes that new samples may take now; 0 while the journal is failing.

        A sample takes its payload and some hundred bytes besides; what is appended counts at once,
        durable or not. If this is less than `wanted` (0: than a block may have), `on_capacity`
        follows when it may be there; room for more than a segment is made then.
        """
        wanted = wanted or self._max_block
        found = self._capacity.ask(wanted)
        if found < wanted:
            with self._wake:
                self._wake.notify()
        return found

    def append(self, facts: Sequence[Fact], totals: Mapping[str, object]) -> int:
        """Queue facts, and the totals after them, as one batch that is whole or not there at all.

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
        """Read back the payload of a sample that is neither dropped nor done with.

        Raises JournalError if it is not kept, JournalCorrupt if it is not what was written.
        """
        return self._store.fetch(ticket)

    def statistics(self) -> JournalStatistics:
        """What there is now."""
        return replace(
            self._statistics,
            appended_lsn=self._appended,
            queued_batches=len(self._queue),
            errors=dict(self._errors),
        )

    def close(self, timeout: float = 10.0) -> bool:
        """Write and sync what is queued, then let go of the directory; within `timeout` seconds.

        Returns whether every batch is durable now, and the thread has ended in order.
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
        """Do what is to be done next; False when it was the last thing."""
        batches = self._take()
        if batches and not self._persist(batches):
            return False
        if self._sync_due is not None and monotonic() >= self._sync_due:
            self._sync_due = None
            if self._store.dirty:
                self._store.sync()
        if not self._tend():
            return False
        if self._ask_again_due is not None and monotonic() >= self._ask_again_due:
            self._ask_again_due = None
            self.on_capacity()
        self._publish()
        return not self._closing or bool(self._queue)

    def _tend(self) -> bool:
        """See every second, or once that helps, whether what was in the way still is."""
        in_trouble = self._store.trouble is not None
        if not in_trouble and not self._capacity.wide:
            self._tend_due = None
            return True
        waits = self._tend_due is not None and monotonic() < self._tend_due
        if waits and not self._store.can_free:
            return True
        self._tend_due = monotonic() + RETRY_SECONDS
        if in_trouble:
            self._store.tend()
            return self._reclaim()
        wanted, self._capacity.wide = self._capacity.wide, 0
        try:
            self._store.reserve(wanted)
        except JournalFull:  # the others go on
            self._ask_again_due = monotonic() + ASK_AGAIN_SECONDS
        return True

    def _take(self) -> list[Batch]:
        """Wait for batches, or until a sync or a retry is due."""
        with self._wake:
            if not self._queue and not self._closing:
                self._wake.wait(self._patience())
            batches: list[Batch] = []
            left = self._max_block
            while self._queue and (not batches or self._queue[0].nbytes <= left):
                batches.append(self._queue.popleft())
                left -= batches[-1].nbytes
            return batches

    def _patience(self) -> float | None:
        """Seconds until something is due; None if nothing is."""
        tend_due = (self._tend_due or 0.0) if self._capacity.wide else self._tend_due
        times = (self._sync_due, tend_due, self._ask_again_due)
        due = [at for at in times if at is not None]
        return max(0.0, min(due) - monotonic()) if due else None

    def _persist(self, batches: list[Batch]) -> bool:
        rows = [row for batch in batches for row in batch.rows]
        payloads = [payload for batch in batches for payload in batch.payloads]
        last, active = batches[-1], self._store.active
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
        return self._store.active == active or self._reclaim()

    def _reclaim(self) -> bool:
        """Once a segment: write again what keeps nearly empty segments from being free.

        As far as there is room for it, since it must no more than new samples use what plans may
        need; or in a segment besides, since samples that come fast leave no room.
        """
        for _ in range(MOVES):
            moves = self._store.moves()
            if moves is None:
                break
            batch = Batch(self._store.lsn, *moves, self._store.state.ledger.totals)
            counted = self._capacity.reserve(batch.most, self._store.left)
            if not counted and not self._store.has_for_another():
                break
            if not self._write(batch.rows, batch.payloads, batch.totals, batch.lsn):
                return False
            self._publish(batch.most if counted else 0)
        return True

    def _write(self, rows: list[Row], payloads: list[memoryview], totals: str, lsn: int) -> bool:
        return self._insist(
            lambda: self._store.place(rows, payloads, totals, lsn)
        ) and self._insist(self._store.flush)

    def _insist(self, action: Callable[[], None]) -> bool:
        """Do it, and while there is no room try again every second; False if closing meanwhile."""
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
        """Say what is wrong, if something is; what goes on is one trouble, not many."""
        if failure is not None and type(failure) is not type(self.failure):
            self._errors[Trouble.FULL if isinstance(failure, JournalFull) else Trouble.BROKEN] += 1
        self.failure = failure

    def _publish(self, written: int = 0) -> None:
        """Tell what is so now; written: bytes that were queued and are no more."""
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
            with suppress(Exception):  # what has broken may break here too, and is told already
                self._store.abandon()


def _do_nothing() -> None:
    """What `on_capacity` is until somebody wants to know."""


def _ignore(told: object) -> None:
    """What the other callbacks are until somebody wants to know."""
