"""What the rows of the log add up to, and how the index differs from it.

One reducer serves both directions: the writer applies each block as it writes it, recovery applies
each block as it reads it. Invariants: a sample is in `kept` from its acceptance until it is
dropped, or committed and not retained; `live` counts exactly the kept samples' payload bytes by
segment, of payloads that the log has; what has changed since the last snapshot is in the `changed`
sets, so a snapshot costs what has changed and not what there is. A row that does not fit (an
unknown ticket, say) raises ValueError before anything of it is applied.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from rollout_dispatcher.core import facts
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

#: Consecutive tickets that the index keeps in one value: encoding them one by one costs twice as
#: much, and as a rule they change together anyway.
SHELF = 64

#: Rows of one value, which replaces the one before, and where the ledger has it.
_SINGLE = {
    facts.RunBegan.kind: "run_id",
    facts.GroupSizeSet.kind: "group_size",
    facts.CostFitted.kind: "cost",
    facts.SpeedsMeasured.kind: "speeds",
    facts.Configured.kind: "posted",
}

T = TypeVar("T")


class Newest(Generic[T]):
    """The last `horizon` values of their kind, numbered from `first` on.

    Those below `stored` are in the index alone, as there may be a million of them; `new` has the
    others.
    """

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self.first = self.stored = 0
        self.new: deque[T] = deque()

    def __len__(self) -> int:
        return self.stored + len(self.new) - self.first

    @property
    def oldest(self) -> int:
        """Number of the oldest that is remembered."""
        return max(self.first, self.stored + len(self.new) - self._horizon)

    def append(self, value: T) -> None:
        """One more; one that is too old by now is forgotten."""
        self.new.append(value)
        self.first = self.oldest
        while self.new and self.stored < self.first:
            self.new.popleft()
            self.stored += 1

    def are_stored(self) -> None:
        """The index has all of them now."""
        self.stored += len(self.new)
        self.new.clear()


class State:
    """Everything but the payloads.

    id_horizon: ids given by users that are remembered, and ended groups. max_producers: the longest
    silent producer is forgotten beyond it.
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
        #: That of the referenced rows that follow.
        self._stored: StoredObject | None = None

    @property
    def live_bytes(self) -> int:
        """Payload bytes of all kept samples."""
        return sum(live.nbytes for live in self.live.values())

    def apply(self, rows: Iterable[Row], segment: int, places: Iterator[int]) -> None:
        """Add a block's rows; `places`: where its payloads lie in `segment`, in row order."""
        for row in rows:
            match row[0]:
                case records.ACCEPTED | records.OBJECT | records.REFERENCED:
                    self._accept(row, segment, places)
                case records.MOVED:
                    self._move(row, segment, next(places))
                case facts.Planned.kind | facts.Withdrawn.kind:
                    self._plan(row)
                case facts.Committed.kind:
                    self._commit(*row[1:])
                case facts.Resumed.kind:
                    self._resume(row[1])
                case facts.CheckpointSaved.kind | facts.RetainedEvicted.kind:
                    self._forget_retained(*row)
                case facts.Dropped.kind:
                    self._drop(row[1])
                case facts.GroupSized.kind:
                    self._size(*row[1:])
                case (
                    facts.FloorRaised.kind
                    | facts.ProducerKeyed.kind
                    | facts.ProducerLeft.kind
                    | facts.ProducerSaid.kind
                ):
                    self._hear(row)
                case records.SCHEMA:
                    self.schemas[row[1]] = records.schema_of(row[2])
                    self.changed.schemas.add(row[1])
                case _:
                    self._note(row)

    def shelf(self, number: int) -> list[LiveSample]:
        """The kept samples of a shelf."""
        tickets = range(number * SHELF, (number + 1) * SHELF)
        return [self.kept[ticket] for ticket in tickets if ticket in self.kept]

    def keep(self, kept: LiveSample) -> None:
        """Count a sample as kept, where it lies."""
        self.kept[kept.ticket] = kept
        if kept.stored is not None:
            return
        live = self.live.setdefault(kept.segment, Live())
        live.samples += 1
        live.nbytes += kept.nbytes

    def snapshot_taken(self) -> None:
        """The index has everything now."""
        self.given_ids.are_stored()
        self.ended_groups.are_stored()
        self.changed = Changed()

    def phases(self) -> list[int]:
        """Ended phases that may still have buffered samples, and the newest, which bars others."""
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

    def _accept(self, row: Row, segment: int, places: Iterator[int]) -> None:
        if row[0] == records.OBJECT:
            self._stored = StoredObject(*row[1:])
            return
        place: Row
        if row[0] == records.ACCEPTED:
            place = [segment, next(places), *row[records.ROWS :]]
        elif self._stored is not None:
            place = [0, row[records.OFFSET], row[records.ROWS], self._stored]
        else:
            raise ValueError(f"ticket {row[1]} is in no object")
        kept = LiveSample(*row[1 : records.PRODUCER + 1], *place)
        if kept.ticket in self.kept:
            raise ValueError(f"ticket {kept.ticket} is accepted twice")
        self.keep(kept)
        self.changed.shelves.add(kept.ticket // SHELF)
        self.ledger.next_ticket = max(self.ledger.next_ticket, kept.ticket + 1)
        name, seq, given_id, checksum = row[records.PRODUCER : records.ROWS]
        producer = self._producer(name)
        producer.left = False
        if seq >= producer.floor:
            producer.accepted.add(seq)
        if given_id is not None:
            self.given_ids.append((given_id, checksum))

    def _move(self, row: Row, segment: int, offset: int) -> None:
        kept = self._known(row[1])
        self._release(kept)
        kept.segment, kept.offset = segment, offset
        self.keep(kept)
        self.changed.shelves.add(kept.ticket // SHELF)

    def _size(self, tickets: Sequence[int], size: int) -> None:
        """A group has another number of members than its samples said."""
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

    def _drop(self, tickets: Sequence[int]) -> None:
        doomed = [self._known(ticket) for ticket in tickets]
        for number in {kept.step for kept in doomed} - {-1}:
            # A sample may be given up inside a step; the step is then planned again.
            step = self.steps[number]
            step.micro_batches = [
                [[ticket for ticket in part if ticket not in tickets] for part in rank]
                for rank in step.micro_batches
            ]
            self.changed.steps.add(number)
        for kept in doomed:
            self._remove(kept.ticket)

    # -- steps ------------------------------------------------------------------------------

    def _plan(self, row: Row) -> None:
        """A step has a plan, or another one, or has lost it, or is none any more."""
        if row[0] == facts.Withdrawn.kind:
            self._withdraw(*row[1:])
            return
        _, number, digest, planned_at, micro_batches, passed_over, *more = row
        step = StepRecord(digest, planned_at, micro_batches, Stage.OPEN, *more)
        members = [self._known(ticket) for ticket in step.tickets()]
        passed = [self._known(ticket) for ticket in passed_over]
        if number in self.steps:  # planned again: who is not in it any more is buffered
            step.stage = self.steps[number].stage
            for ticket in self.steps[number].tickets():
                if self.kept[ticket].step == number:  # else the step before has taken it over
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

    def _withdraw(self, number: int, attempt: int) -> None:
        """The last step is none; samples that it had are in the one before it."""
        members = self.steps[number].tickets()
        if number != self.ledger.next_step - 1 or any(self._is_in(at, number) for at in members):
            raise ValueError(f"step {number} is not the last, or has samples")
        del self.steps[number]
        self.changed.steps.add(number)
        self.ledger.next_step = number
        self.ledger.withdrawn.append((number, attempt))

    def _is_in(self, ticket: int, number: int) -> bool:
        return ticket in self.kept and self.kept[ticket].step == number

    def _commit(self, number: int, retained: bool = False) -> None:
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

    def _resume(self, after: int) -> None:
        """The generation goes on after that step: what is retained of later ones is open again."""
        rewound = [number for number in self._retained() if number > after]
        for number in rewound:
            self.steps[number].stage = Stage.REWOUND
        self.changed.steps.update(rewound)
        if rewound:
            # The weights are older ones again.
            self.ledger.policy_version = self.ledger.policy_step = None
        self.ledger.resumed = after

    def _forget_retained(self, kind: str, through: int) -> None:
        """The retained steps up to there are not needed, or there was no room for them."""
        if kind == facts.CheckpointSaved.kind:
            self.ledger.saved = through
        else:
            self.ledger.evicted = through
        for number in [number for number in self._retained() if number <= through]:
            self._forget(number)

    # -- the rest ---------------------------------------------------------------------------

    def _note(self, row: Row) -> None:
        if (name := _SINGLE.get(row[0])) is not None:
            setattr(self.ledger, name, row[1])
            return
        match row[0]:
            case facts.GenerationBegan.kind:
                _, self.ledger.generation, self.ledger.dp_size = row
                self.ledger.resumed, self.ledger.was_finished = None, False
            case facts.VersionReported.kind:
                _, self.ledger.policy_version, self.ledger.policy_step = row
            case facts.PhaseEnded.kind:
                if row[1] not in self.ledger.phases:
                    self.ledger.phases.append(row[1])
            case records.FIXED:
                if row[1] not in self.schemas:
                    raise ValueError(f"schema {row[1]} is not known")
                _, self.ledger.schema, self.ledger.set_by = row
            case facts.GroupEnded.kind:
                _, group_id, why = row
                self.ended_groups.append((group_id, why))
            case facts.StreamEnded.kind | facts.Finished.kind:
                self._end(row)
            case _:
                self._note_of_stores(row)

    def _end(self, row: Row) -> None:
        """Nothing comes any more, until a finished run goes on in the next process."""
        if row[0] == facts.StreamEnded.kind:
            self.ledger.ended = True
        else:
            self.ledger.finished, self.ledger.was_finished = row[1], not row[1]

    def _note_of_stores(self, row: Row) -> None:
        """In which object samples lie; which are unneeded or gone; whose may be there."""
        ledger = self.ledger
        match row:
            case [records.OBJECT, *stored]:
                self._stored = StoredObject(*stored)
            case [facts.Releasable.kind, objects]:
                for store, key, nbytes in objects:
                    ledger.unneeded.setdefault(store, {})[key] = nbytes
            case [facts.Deleted.kind, names]:
                for store, key in names:
                    ledger.unneeded.get(store, {}).pop(key, None)
            case [facts.IncarnationBegan.kind, producer, incarnation]:
                ledger.incarnations[incarnation] = producer
            case [facts.IncarnationSwept.kind, incarnation]:
                ledger.incarnations.pop(incarnation, None)
            case [kind, *_]:
                raise ValueError(f"a row of kind {kind!r} is not known")

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

    def _hear(self, row: Row) -> None:
        """A producer has spoken of itself."""
        producer = self._producer(row[1])
        if row[0] == facts.FloorRaised.kind:
            producer.raise_floor(row[2])
        elif row[0] == facts.ProducerKeyed.kind:
            producer.key = row[2]
        elif row[0] == facts.ProducerLeft.kind:
            producer.left = True
        else:
            producer.phase, producer.ended = row[2:]
            producer.left = False
