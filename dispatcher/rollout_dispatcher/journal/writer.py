"""The journal's one thread: batches from its queue become blocks, and durable.

    RUNNING --no room--> FAILING --room again--> RUNNING
       |                    |
       +---- anything else -+--> BROKEN

Everything that is queued when it comes by becomes one block, up to a quarter of a segment.
Invariants: batches become durable in order; a batch is never dropped while the journal is failing,
it waits and is tried every second; a broken journal writes nothing more, so nothing later can look
durable.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Protocol

from rollout_dispatcher.errors import JournalError, JournalFull
from rollout_dispatcher.journal.capacity import Capacity
from rollout_dispatcher.journal.policy import SyncMode, SyncPolicy
from rollout_dispatcher.journal.records import Batch, Row
from rollout_dispatcher.journal.statistics import JournalStatistics, Trouble
from rollout_dispatcher.journal.store import Store

#: Segments that are emptied after each new one; more than one, so that a backlog shrinks.
MOVES = 4
#: How often something that had no room is tried again.
RETRY_SECONDS = 1.0
#: When who wanted more than the disk has is told to ask again; until then nothing is tried.
ASK_AGAIN_SECONDS = 10.0


class WriterCallbacks(Protocol):
    """Who is told what has become of the batches, on the writer's thread."""

    on_durable: Callable[[int], None]
    on_broken: Callable[[JournalError], None]
    on_sync: Callable[[float], None]
    on_capacity: Callable[[], None]


class Writer:
    """Owns the store from now on, and closes it.

    max_block: payload bytes of a block, but for a single batch. failure: why new samples are to be
    refused: no room for now, or broken for good.
    """

    def __init__(
        self, store: Store, policy: SyncPolicy, max_block: int, told: WriterCallbacks
    ) -> None:
        self.failure: JournalError | None = None
        self.broken = False
        self._store, self._policy, self._max_block, self._told = store, policy, max_block, told
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

    # -- from any thread --------------------------------------------------------------------

    def capacity(self, wanted: int = 0) -> int:
        """As `Journal.capacity`."""
        wanted = wanted or self._max_block
        found = self._capacity.ask(wanted)
        if found < wanted:
            with self._wake:
                self._wake.notify()
        return found

    def append(self, encode: Callable[[int], Batch]) -> int:
        """Queue the batch that `encode` makes of its number, and return that."""
        with self._wake:
            if self.broken or self._closing:
                raise self.failure or JournalError("the journal is closed")
            batch = encode(self._appended + 1)
            self._queue.append(batch)
            self._capacity.queue(batch.most)
            self._appended += 1
            self._wake.notify()
            return self._appended

    def statistics(self) -> JournalStatistics:
        """What there is now."""
        return replace(
            self._statistics,
            appended_lsn=self._appended,
            queued_batches=len(self._queue),
            errors=dict(self._errors),
        )

    def close(self, timeout: float) -> bool:
        """As `Journal.close`."""
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
            self._told.on_capacity()
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
        self._told.on_durable(last.lsn)
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
        self._told.on_sync(seconds)

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
            self._told.on_capacity()

    def _observe(self) -> JournalStatistics:
        store, live = self._store, self._store.state.live.values()
        return JournalStatistics(
            durable_lsn=self._durable,
            appended_lsn=self._appended,
            queued_batches=len(self._queue),
            batches=self._batches,
            records=store.num_records,
            blocks=store.num_blocks,
            syncs=store.num_syncs,
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
            self._told.on_broken(failure)
        finally:
            with suppress(Exception):  # what has broken may break here too, and is told already
                self._store.abandon()
