"""The state that the rows of the log add up to, and its changes since the last snapshot.

The writer applies each block as it writes it, recovery as it reads it. Invariants: a sample is in
`kept` from its acceptance until it is dropped, or committed and not retained; `live` has the number
and payload bytes of the kept samples in each segment; `changed` has everything that the index
lacks, so a snapshot costs what has changed. A row that contradicts the state (an unknown ticket,
say) raises ValueError before any of it is applied.

A row of the kind `planned` calls the method `on_planned` with its values.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from rollout_dispatcher.journal import records
from rollout_dispatcher.journal.parts import (
    Changed,
    Ledger,
    Live,
    LiveSample,
    ProducerRecord,
    Stage,
    StepRecord,
)
from rollout_dispatcher.journal.records import Row
from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.sample import Schema

#: Consecutive tickets in one value of the index: encoding them one by one costs twice as much, and
#: they mostly change together.
SHELF = 64

#: Kinds whose names in the journal are kept for compatibility, and their methods.
_METHODS = {"said": "producer_ended"}

T = TypeVar("T")


class Newest(Generic[T]):
    """The last `horizon` values of a kind, numbered from `first` on.

    Values below `stored` are in the index alone, as there may be a million; the others in `new`.
    """

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self.first = self.stored = 0
        self.new: deque[T] = deque()

    def __len__(self) -> int:
        return self.stored + len(self.new) - self.first

    @property
    def oldest(self) -> int:
        """Number of the oldest value within the horizon."""
        return max(self.first, self.stored + len(self.new) - self._horizon)

    def append(self, value: T) -> None:
        """Add a value; the oldest leaves beyond the horizon."""
        self.new.append(value)
        self.first = self.oldest
        while self.new and self.stored < self.first:
            self.new.popleft()
            self.stored += 1

    def are_stored(self) -> None:
        """The index has all values now."""
        self.stored += len(self.new)
        self.new.clear()


class State:
    """Everything but the payloads.

    id_horizon: number of ids given by users that are kept, and of ended groups. max_producers: of
    more producers, the one silent for longest is deleted.
    """

    def __init__(self, id_horizon: int, max_producers: int) -> None:
        self._max_producers = max_producers
        self.ledger = Ledger()
        self.schemas: dict[int, Schema] = {}
        self.kept: dict[int, LiveSample] = {}
        self.steps: dict[int, StepRecord] = {}
        self.producers: OrderedDict[str, ProducerRecord] = OrderedDict()
        self.given_ids = Newest[tuple[str, int | None]](id_horizon)
        self.ended_groups = Newest[tuple[str, str]](id_horizon)
        self.live: dict[int, Live] = {}
        self.changed = Changed()
        # Offsets of the block's payloads, and the object of the referenced rows that follow.
        self._segment = 0
        self._places: Iterator[int] = iter(())
        self._stored: StoredObject | None = None

    @property
    def live_bytes(self) -> int:
        """Payload bytes of all kept samples."""
        return sum(live.nbytes for live in self.live.values())

    def apply(self, rows: Iterable[Row], segment: int, places: Iterator[int]) -> None:
        """Apply a block's rows. places: offsets of its payloads in `segment`, in row order."""
        self._segment, self._places = segment, places
        for kind, *values in rows:
            apply = getattr(self, f"on_{_METHODS.get(kind, kind)}".replace("-", "_"), None)
            if apply is None:
                raise ValueError(f"a row of kind {kind!r} is not known")
            apply(*values)

    def shelf(self, number: int) -> list[LiveSample]:
        """The kept samples of a shelf of tickets."""
        tickets = range(number * SHELF, (number + 1) * SHELF)
        return [self.kept[ticket] for ticket in tickets if ticket in self.kept]

    def keep(self, kept: LiveSample) -> None:
        """Add a sample to `kept`, and to its segment in `live`."""
        self.kept[kept.ticket] = kept
        if kept.stored is not None:
            return
        live = self.live.setdefault(kept.segment, Live())
        live.samples += 1
        live.nbytes += kept.nbytes

    def snapshot_taken(self) -> None:
        """The index has all changes now."""
        self.given_ids.are_stored()
        self.ended_groups.are_stored()
        self.changed = Changed()

    def phases(self) -> list[int]:
        """Ended phases that may still have buffered samples, and the newest ended one."""
        phases = sorted(set(self.ledger.phases))
        versions = [
            None if kept.staleness_exempt else kept.policy_version
            for kept in self.kept.values()
            if kept.step < 0
        ]
        if not phases or not versions:
            return phases[-1:]
        oldest = min(version or 0 for version in versions)
        return [phase for phase in phases[:-1] if oldest < phase] + phases[-1:]

    # -- samples ----------------------------------------------------------------------------

    def on_accepted(self, *row: Any) -> None:
        rows = row[records.ROWS - 1 :]
        self._accept(row, self._segment, next(self._places), *rows)

    def on_object(self, *stored: Any) -> None:
        self._stored = StoredObject(*stored)

    def on_referenced(self, *row: Any) -> None:
        if self._stored is None:
            raise ValueError(f"ticket {row[0]} is in no object")
        *_, rows, offset = row
        self._accept(row, 0, offset, rows, self._stored)

    def _accept(self, row: tuple[Any, ...], *place: Any) -> None:
        kept = LiveSample(*row[: records.PRODUCER], *place)
        if kept.ticket in self.kept:
            raise ValueError(f"ticket {kept.ticket} is accepted twice")
        self.keep(kept)
        self.changed.shelves.add(kept.ticket // SHELF)
        self.ledger.next_ticket = max(self.ledger.next_ticket, kept.ticket + 1)
        name, seq, given_id, checksum = row[records.PRODUCER - 1 : records.ROWS - 1]
        producer = self._producer(name)
        producer.left = False
        if seq >= producer.floor:
            producer.accepted.add(seq)
        if given_id is not None:
            self.given_ids.append((given_id, checksum))

    def on_moved(self, ticket: int, *_: int) -> None:
        kept = self._known(ticket)
        self._release(kept)
        kept.segment, kept.offset = self._segment, next(self._places)
        self.keep(kept)
        self.changed.shelves.add(kept.ticket // SHELF)

    def on_sized(self, tickets: Sequence[int], size: int) -> None:
        """A group has another number of members than its samples were pushed with."""
        for kept in [self._known(ticket) for ticket in tickets]:
            kept.group_size = size
            self.changed.shelves.add(kept.ticket // SHELF)

    def _release(self, kept: LiveSample) -> None:
        if kept.stored is not None:
            return
        live = self.live[kept.segment]
        live.samples -= 1
        live.nbytes -= kept.nbytes
        if not live.samples:
            del self.live[kept.segment]

    def _remove(self, ticket: int) -> None:
        kept = self.kept.pop(ticket)
        self._release(kept)
        self.changed.shelves.add(ticket // SHELF)

    def _known(self, ticket: int) -> LiveSample:
        kept = self.kept.get(ticket)
        if kept is None:
            raise ValueError(f"ticket {ticket} is not kept")
        return kept

    def on_dropped(self, tickets: Sequence[int], _: str) -> None:
        doomed = [self._known(ticket) for ticket in tickets]
        for number in {kept.step for kept in doomed} - {-1}:
            # A sample of an open step may be dropped; the step is then planned again.
            step = self.steps[number]
            step.micro_batches = [
                [[ticket for ticket in part if ticket not in tickets] for part in rank]
                for rank in step.micro_batches
            ]
            self.changed.steps.add(number)
        for kept in doomed:
            self._remove(kept.ticket)

    # -- steps ------------------------------------------------------------------------------

    def on_planned(
        self,
        number: int,
        digest: str,
        planned_at: float,
        micro_batches: Sequence[Sequence[Sequence[int]]],
        passed_over: Sequence[int],
        *more: Any,
    ) -> None:
        """A step has a plan, another plan, or no plan any more."""
        step = StepRecord(digest, planned_at, micro_batches, Stage.OPEN, *more)
        members = [self._known(ticket) for ticket in step.tickets()]
        passed = [self._known(ticket) for ticket in passed_over]
        if number in self.steps:  # planned again: samples that left it are buffered
            step.stage = self.steps[number].stage
            for ticket in self.steps[number].tickets():
                if self.kept[ticket].step == number:  # else it has moved to the step before
                    self.kept[ticket].step = -1
        for kept in members:
            kept.step = number
        for kept in passed:
            kept.skips += 1
        self.changed.shelves.update(ticket // SHELF for ticket in passed_over)
        self.steps[number] = step
        self.changed.steps.add(number)
        self.ledger.next_step = max(self.ledger.next_step, number + 1)
        self.ledger.withdrawn = [pair for pair in self.ledger.withdrawn if pair[0] != number]

    def on_withdrawn(self, number: int, attempt: int) -> None:
        """The last step is withdrawn; its samples are in the one before."""
        members = self.steps[number].tickets()
        if number != self.ledger.next_step - 1 or any(self._is_in(at, number) for at in members):
            raise ValueError(f"step {number} is not the last, or has samples")
        del self.steps[number]
        self.changed.steps.add(number)
        self.ledger.next_step = number
        self.ledger.withdrawn.append((number, attempt))

    def _is_in(self, ticket: int, number: int) -> bool:
        return ticket in self.kept and self.kept[ticket].step == number

    def on_committed(self, number: int, retained: bool = False) -> None:
        step = self.steps.get(number)
        if step is None or step.stage == Stage.RETAINED:
            raise ValueError(f"step {number} is not open")
        if retained:
            step.stage = Stage.RETAINED
            self.changed.steps.add(number)
        else:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self.changed.steps.add(number)
        for ticket in self.steps.pop(number).tickets():
            self._remove(ticket)

    def _retained(self) -> list[int]:
        return [number for number, step in self.steps.items() if step.stage == Stage.RETAINED]

    def on_resumed(self, after: int) -> None:
        """The generation resumes after that step: later retained steps are open again."""
        rewound = [number for number in self._retained() if number > after]
        for number in rewound:
            self.steps[number].stage = Stage.REWOUND
        self.changed.steps.update(rewound)
        if rewound:
            # The trainer has older weights again.
            self.ledger.policy_version = self.ledger.policy_step = None
        self.ledger.resumed = after

    def on_saved(self, through: int) -> None:
        """A checkpoint covers the steps up to this one."""
        self.ledger.saved = through
        self._forget_retained(through)

    def on_evicted(self, through: int) -> None:
        """Retained steps up to this one were evicted."""
        self.ledger.evicted = through
        self._forget_retained(through)

    def _forget_retained(self, through: int) -> None:
        for number in [number for number in self._retained() if number <= through]:
            self._forget(number)

    # -- the rest ---------------------------------------------------------------------------

    def on_schema(self, number: int, row: Row) -> None:
        self.schemas[number] = records.schema_of(row)
        self.changed.schemas.add(number)

    def on_fixed(self, number: int, set_by: str) -> None:
        if number not in self.schemas:
            raise ValueError(f"schema {number} is not known")
        self.ledger.schema, self.ledger.set_by = number, set_by

    def on_run(self, run_id: str) -> None:
        self.ledger.run_id = run_id

    def on_size(self, size: int | None) -> None:
        self.ledger.group_size = size

    def on_cost(self, cost: Row) -> None:
        self.ledger.cost = cost

    def on_speeds(self, speeds: Row) -> None:
        self.ledger.speeds = speeds

    def on_configured(self, _: list[Row]) -> None:
        """Ignored: settings that 0.1 accepted over HTTP."""

    def on_generation(self, number: int, dp_size: int) -> None:
        self.ledger.generation, self.ledger.dp_size = number, dp_size
        self.ledger.resumed, self.ledger.was_finished = None, False

    def on_version(self, version: int, first_step: int) -> None:
        self.ledger.policy_version, self.ledger.policy_step = version, first_step

    def on_phase(self, version: int) -> None:
        if version not in self.ledger.phases:
            self.ledger.phases.append(version)

    def on_group_ended(self, group_id: str, why: str) -> None:
        self.ended_groups.append((group_id, why))

    def on_ended(self) -> None:
        self.ledger.ended = True

    def on_finished(self, pending: bool) -> None:
        """pending: ranks have not all received the end; else the run may go on in a new process."""
        self.ledger.finished, self.ledger.was_finished = pending, not pending

    def on_unneeded(self, objects: Sequence[Row]) -> None:
        for store, key, nbytes in objects:
            self.ledger.unneeded.setdefault(store, {})[key] = nbytes

    def on_forgotten(self, names: Sequence[Row]) -> None:
        for store, key in names:
            self.ledger.unneeded.get(store, {}).pop(key, None)

    def on_incarnation(self, producer: str, incarnation: str) -> None:
        self.ledger.incarnations[incarnation] = producer

    def on_swept(self, incarnation: str) -> None:
        self.ledger.incarnations.pop(incarnation, None)

    # -- producers --------------------------------------------------------------------------

    def _producer(self, name: str) -> ProducerRecord:
        producer = self.producers.get(name)
        if producer is None:
            producer = self.producers[name] = ProducerRecord()
        self.producers.move_to_end(name)
        self.changed.producers.add(name)
        while len(self.producers) > self._max_producers:
            forgotten, _ = self.producers.popitem(last=False)
            self.changed.producers.add(forgotten)
        return producer

    def on_floor(self, name: str, floor: int) -> None:
        self._producer(name).raise_floor(floor)

    def on_keyed(self, name: str, key: str) -> None:
        self._producer(name).key = key

    def on_left(self, name: str) -> None:
        self._producer(name).left = True

    def on_producer_ended(self, name: str, phase: int, ended: bool) -> None:
        producer = self._producer(name)
        producer.phase, producer.ended, producer.left = phase, ended, False
