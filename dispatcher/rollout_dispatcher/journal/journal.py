"""The journal as its user sees it: append from one thread, hear from another what is durable.

    append --> queue --> writer thread: block, write, sync as the policy says --> on_durable(lsn)

Invariants: `on_durable` is told ascending numbers, each after all batches up to it are durable
under the policy; as long as new samples keep to `capacity`, they never touch the last spare, so
that what frees room again (plans, commits, drops) finds some on a full disk.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from rollout_dispatcher.core.facts import Fact, RecoveredState
from rollout_dispatcher.errors import JournalError
from rollout_dispatcher.journal.policy import SyncMode, SyncPolicy
from rollout_dispatcher.journal.records import Encoder
from rollout_dispatcher.journal.state import State
from rollout_dispatcher.journal.statistics import JournalStatistics
from rollout_dispatcher.journal.store import Store
from rollout_dispatcher.journal.writer import Writer


class Journal:
    """One journal directory, and the thread that writes to it. Made by `Journal.open`.

    on_durable, on_broken, on_sync and on_capacity are called from the writer thread: hand over and
    return. on_capacity: there may be as much now as `capacity` was asked for and fell short of.
    """

    def __init__(self, store: Store, policy: SyncPolicy, encoder: Encoder, max_block: int) -> None:
        self.on_durable: Callable[[int], None] = _ignore
        self.on_broken: Callable[[JournalError], None] = _ignore
        self.on_sync: Callable[[float], None] = _ignore
        self.on_capacity: Callable[[], None] = _do_nothing
        self._store, self._encoder = store, encoder
        self._writer = Writer(store, policy, max_block, self)

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

    @property
    def broken(self) -> bool:
        """Whether it failed for good."""
        return self._writer.broken

    @property
    def failure(self) -> JournalError | None:
        """Why new samples are to be refused: no room for now, or broken for good."""
        return self._writer.failure

    def capacity(self, wanted: int = 0) -> int:
        """Bytes that new samples may take now; 0 while the journal is failing. From any thread.

        A sample takes its payload and some hundred bytes besides; what is appended counts at once,
        durable or not. If this is less than `wanted` (0: than a block may have), `on_capacity`
        follows when it may be there; room for more than a segment is made then.
        """
        return self._writer.capacity(wanted)

    def append(self, facts: Sequence[Fact], totals: Mapping[str, object]) -> int:
        """Queue facts, and the totals after them, as one batch that is whole or not there at all.

        Returns the batch's number; `on_durable` follows. Payloads must not change until then.
        Raises JournalError if the journal is broken or closed, TypeError for totals that are not
        JSON.
        """
        return self._writer.append(lambda lsn: self._encoder.batch(lsn, facts, totals))

    def fetch(self, ticket: int) -> bytes:
        """Read back the payload of a sample that is neither dropped nor done with.

        Raises JournalError if it is not kept, JournalCorrupt if it is not what was written.
        """
        return self._store.fetch(ticket)

    def statistics(self) -> JournalStatistics:
        """What there is now."""
        return self._writer.statistics()

    def close(self, timeout: float = 10.0) -> bool:
        """Write and sync what is queued, then let go of the directory; within `timeout` seconds.

        Returns whether every batch is durable now, and the writer has ended in order.
        """
        return self._writer.close(timeout)


def _do_nothing() -> None:
    """What `on_capacity` is until somebody wants to know."""


def _ignore(told: object) -> None:
    """What the callbacks are until somebody wants to know."""
