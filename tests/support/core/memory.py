"""What facts add up to, kept in dictionaries: the journal without files, to check cores against."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rollout_dispatcher.core import facts as f
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.sample import Schema
from tests.support.samples import span_of


class Memory:
    """Notes facts in order; `remembered` is what a new core would start from."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._steps: dict[int, f.Planned] = {}
        self._retained: dict[int, f.Planned] = {}
        self._rewound: set[int] = set()
        self._run_id = ""
        self._resumed: int | None = None
        self._withdrawn: dict[int, int] = {}
        self._saved = self.evicted = -1
        self._accepted: dict[str, set[int]] = {}
        self._floors: dict[str, int] = {}
        self._given_ids: list[tuple[str, int | None]] = []
        self._ended_groups: list[tuple[str, str]] = []
        self._next_ticket = self._next_step = self._generation = 0
        self._dp_size: int | None = None
        self._version: int | None = None
        self._version_step = 0
        self._words: dict[str, tuple[int, bool]] = {}
        self._keys: dict[str, str] = {}
        self._left: set[str] = set()
        self._phases: list[int] = []
        self._ended = self._finished = False
        self._schema: Schema | None = None
        self._set_by = ""
        self._cost: f.CostFitted | None = None
        self._speeds: f.SpeedsMeasured | None = None
        self._totals: Mapping[str, Any] = {}
        self._unneeded: dict[StoredObject, None] = {}
        self._incarnations: dict[str, str] = {}

    def note(self, facts: Iterable[f.Fact], totals: Mapping[str, Any]) -> None:
        """Remember facts and the totals after them."""
        for fact in facts:
            self._note_one(fact)
            self._totals = totals

    def remembered(self) -> f.RecoveredState:
        """Everything, in objects of its own where a core would change them."""
        entries = {ticket: _copy(entry) for ticket, entry in self._entries.items()}
        plans = [*self._retained.values(), *self._steps.values()]
        in_steps = {ticket for plan in plans for ticket in _tickets(plan)}
        for plan in plans:
            if plan.step in self._retained or plan.step in self._rewound:
                for ticket in _tickets(plan):
                    entries[ticket].sample = entries[ticket].sample.in_journal()
        return f.RecoveredState(
            entries=tuple(e for ticket, e in sorted(entries.items()) if ticket not in in_steps),
            steps=tuple(self._remembered(plan, entries) for plan in self._steps.values()),
            retained=tuple(self._remembered(plan, entries) for plan in self._retained.values()),
            run_id=self._run_id,
            resumed=self._resumed,
            saved=self._saved,
            evicted=self.evicted,
            next_ticket=self._next_ticket,
            next_step=self._next_step,
            withdrawn=dict(self._withdrawn),
            generation=self._generation,
            dp_size=self._dp_size,
            policy_version=self._version,
            policy_step=None if self._version is None else self._version_step,
            words=self._words,
            phases=tuple(self._phases),
            schema=self._schema,
            set_by=self._set_by,
            cost=self._cost,
            speeds=self._speeds,
            ended=self._ended,
            finished=self._finished,
            producers={
                name: (self._floors.get(name, 0), frozenset(self._accepted.get(name, set())))
                for name in {*self._accepted, *self._floors, *self._keys, *self._left}
            },
            keys=self._keys,
            left=frozenset(self._left),
            given_ids=tuple(given_id for given_id, _ in self._given_ids),
            checksums=tuple(checksum for _, checksum in self._given_ids),
            ended_groups=tuple(self._ended_groups),
            totals=self._totals,
            unneeded=tuple(self._unneeded),
            incarnations=dict(self._incarnations),
        )

    def payload(self, ticket: int) -> memoryview:
        """What the journal would read back."""
        return span_of(self._entries[ticket].sample)

    def _remembered(self, plan: f.Planned, entries: dict[int, Entry]) -> f.RecoveredStep:
        micro_batches = tuple(
            tuple(tuple(entries[ticket] for ticket in part) for part in rank)
            for rank in plan.micro_batches
        )
        rewound = plan.step in self._rewound
        return f.RecoveredStep(
            plan.step, plan.digest, plan.planned_at, micro_batches, rewound, plan.attempt,
            plan.usual_loss,
        )  # fmt: skip

    def _note_one(self, fact: f.Fact) -> None:
        match fact:
            case f.Accepted():
                self._entries[fact.entry.ticket] = _copy(fact.entry)
                self._next_ticket = fact.entry.ticket + 1
                self._accepted.setdefault(fact.producer, set()).add(fact.seq)
                self._left.discard(fact.producer)
                given = (fact.given_id or "", fact.entry.sample.checksum)
                self._given_ids += [] if fact.given_id is None else [given]
            case f.FloorRaised():
                self._floors[fact.producer] = fact.floor
                kept = self._accepted.get(fact.producer, set())
                self._accepted[fact.producer] = {seq for seq in kept if seq >= fact.floor}
            case f.Planned():
                self._steps[fact.step] = fact
                self._next_step = max(self._next_step, fact.step + 1)
                self._withdrawn.pop(fact.step, None)
                for ticket in fact.passed_over:
                    self._entries[ticket].skips += 1
            case f.Committed():
                plan = self._steps.pop(fact.step)
                if fact.retained:
                    self._retained[fact.step] = plan
                else:
                    self._forget(_tickets(plan))
            case f.Dropped():
                self._forget(fact.tickets)
                self._steps = {at: _without(fact.tickets, of) for at, of in self._steps.items()}
            case f.GroupSized():
                for ticket in fact.tickets:
                    entry = self._entries[ticket]
                    entry.sample = entry.sample._replace(group_size=fact.size)
            case f.Resumed() | f.CheckpointSaved() | f.RetainedEvicted():
                self._note_checkpoint(fact)
            case _:
                self._note_single(fact)

    def _note_single(self, fact: f.Fact) -> None:
        match fact:
            case f.Withdrawn():
                del self._steps[fact.step]
                self._next_step, self._withdrawn[fact.step] = fact.step, fact.attempt
            case f.RunBegan():
                self._run_id = fact.run_id
            case f.GenerationBegan():
                self._generation, self._dp_size = fact.generation, fact.dp_size
                self._resumed = None
            case f.VersionReported():
                self._version, self._version_step = fact.version, fact.first_step
            case f.ProducerLeft():
                self._left.add(fact.producer)
            case f.ProducerKeyed():
                self._keys[fact.producer] = fact.digest
            case f.ProducerSaid():
                self._words[fact.producer] = fact.phase, fact.ended
                self._left.discard(fact.producer)
            case f.PhaseEnded():
                self._phases.append(fact.version)
            case f.SchemaFixed():
                self._schema, self._set_by = fact.schema, fact.set_by
            case f.StreamEnded() | f.Finished():
                self._note_end(fact)
            case f.GroupEnded():
                self._ended_groups.append((fact.group_id, fact.why))
            case _:
                self._note_objects(fact)

    def _note_end(self, fact: f.StreamEnded | f.Finished) -> None:
        if isinstance(fact, f.Finished):
            self._finished = fact.pending
        else:
            self._ended = True

    def _note_objects(self, fact: f.Fact) -> None:
        match fact:
            case f.SpeedsMeasured():
                self._speeds = fact
            case f.CostFitted():
                self._cost = fact
            case f.Releasable():
                self._unneeded |= dict.fromkeys(fact.objects)
            case f.Deleted():
                for stored in fact.objects:
                    self._unneeded.pop(stored, None)
            case f.IncarnationBegan():
                self._incarnations[fact.incarnation] = fact.producer
            case f.IncarnationSwept():
                self._incarnations.pop(fact.incarnation, None)

    def _note_checkpoint(self, fact: f.Resumed | f.CheckpointSaved | f.RetainedEvicted) -> None:
        if not isinstance(fact, f.Resumed):
            if isinstance(fact, f.CheckpointSaved):
                self._saved = fact.step
            else:
                self.evicted = fact.step
            for number in [number for number in self._retained if number <= fact.step]:
                self._forget(_tickets(self._retained.pop(number)))
            return
        back = {step: plan for step, plan in self._retained.items() if step > fact.after}
        self._retained = {at: plan for at, plan in self._retained.items() if at <= fact.after}
        self._steps = back | self._steps
        self._rewound |= back.keys()
        self._version = None if back else self._version
        self._resumed = fact.after

    def _forget(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            del self._entries[ticket]


def _tickets(plan: f.Planned) -> list[int]:
    return [ticket for rank in plan.micro_batches for part in rank for ticket in part]


def _without(tickets: tuple[int, ...], plan: f.Planned) -> f.Planned:
    kept = tuple(
        tuple(tuple(ticket for ticket in part if ticket not in tickets) for part in rank)
        for rank in plan.micro_batches
    )
    return replace(plan, micro_batches=kept)


def _copy(entry: Entry) -> Entry:
    return replace(entry, oldest=None)  # what the journal does not keep is found again
