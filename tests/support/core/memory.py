"""A model of the journal: what facts add up to, the plain way, in dictionaries.

Cores are started again from it, and the journal is checked against it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_dispatcher.core import facts as f
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.steps.step import OpenStep, StepState
from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.sample import Schema
from tests.support.samples import span_of


class Memory:
    """Notes facts in order; `remembered` is what a new core would start from.

    steps: open ones and retained ones. lazy: steps that were ever committed, whose payloads the
    journal alone has. withdrawn: steps that are not planned again, and the last attempt at each.
    """

    def __init__(self, id_horizon: int = 1 << 20) -> None:
        self._id_horizon = id_horizon
        self.entries: dict[int, Entry] = {}
        self.steps: dict[int, f.Planned] = {}
        self.lazy: set[int] = set()
        self.retained: set[int] = set()
        self.withdrawn: dict[int, int] = {}
        self.run_id, self.saved, self.evicted = "", -1, -1
        self.next_ticket = self.next_step = self.generation = 0
        self.resumed: int | None = None
        self.dp_size: int | None = None
        self.version: int | None = None
        self.version_step: int | None = None
        self.group_size: int | None = None
        self.ended = self.finished = self.was_finished = False
        self.phases: set[int] = set()
        self._floors: dict[str, int] = {}
        self._seqs: dict[str, set[int]] = {}
        self._words: dict[str, tuple[int, bool]] = {}
        self._keys: dict[str, str] = {}
        self._left: set[str] = set()
        self._given_ids: list[tuple[str, int | None]] = []
        self._ended_groups: list[tuple[str, str]] = []
        self._schema: Schema | None = None
        self._set_by = ""
        self._cost: f.CostFitted | None = None
        self._speeds: f.SpeedsMeasured | None = None
        self._unneeded: set[StoredObject] = set()
        self._incarnations: dict[str, str] = {}
        self.totals: Mapping[str, Any] = {}

    def note(self, facts: Sequence[f.Fact], totals: Mapping[str, Any]) -> None:
        """Remember facts and the totals after them."""
        for fact in facts:
            self._note(fact)
        if facts:
            self.totals = totals

    def buffered(self) -> list[int]:
        """Tickets in no step."""
        held = {ticket for number in self.steps for ticket in self.members(number)}
        return sorted(self.entries.keys() - held)

    def open(self) -> list[int]:
        """Numbers of the steps that are not committed."""
        return sorted(self.steps.keys() - self.retained)

    def members(self, number: int) -> list[int]:
        """Tickets of a step."""
        return [t for rank in self.steps[number].micro_batches for part in rank for t in part]

    def payloads(self) -> dict[int, bytes]:
        """Every payload of the log that is neither dropped nor done with, by ticket."""
        here = [at for at, entry in self.entries.items() if entry.sample.is_in_memory]
        return {ticket: self.payload(ticket) for ticket in here}

    def payload(self, ticket: int) -> bytes:
        """What the journal would read back."""
        return span_of(self.entries[ticket].sample).tobytes()

    def remembered(self) -> f.RecoveredState:
        """Everything, in objects of its own where a core would change them."""
        return f.RecoveredState(
            entries=tuple(_copy(self.entries[ticket]) for ticket in self.buffered()),
            steps=tuple(map(self._step, self.open())),
            rewound=any(at in self.lazy for at in self.open()),
            retained=tuple(map(self._step, sorted(self.retained))),
            run_id=self.run_id,
            resumed=self.resumed,
            saved=self.saved,
            evicted=self.evicted,
            next_ticket=self.next_ticket,
            next_step=self.next_step,
            withdrawn=dict(self.withdrawn),
            generation=self.generation,
            dp_size=self.dp_size,
            policy_version=self.version,
            policy_step=self.version_step,
            ends={name: word for name, word in self._words.items() if word != (0, False)},
            phases=self._phases(),
            schema=self._schema,
            set_by=self._set_by,
            group_size=self.group_size,
            cost=self._cost,
            speeds=self._speeds,
            ended=self.ended,
            finished=self.finished,
            was_finished=self.was_finished,
            producers={
                name: (floor, frozenset(seq for seq in self._seqs[name] if seq >= floor))
                for name, floor in self._floors.items()
            },
            keys=dict(self._keys),
            left=frozenset(self._left),
            given_ids=tuple(given_id for given_id, _ in self._newest(self._given_ids)),
            checksums=tuple(checksum for _, checksum in self._newest(self._given_ids)),
            ended_groups=tuple(self._newest(self._ended_groups)),
            totals=self.totals,
            unneeded=tuple(self._unneeded),
            incarnations=dict(self._incarnations),
        )

    def _step(self, number: int) -> OpenStep:
        plan, lazy = self.steps[number], number in self.lazy
        micro_batches = tuple(
            tuple(tuple(_copy(self.entries[at], lazy=lazy) for at in part) for part in rank)
            for rank in plan.micro_batches
        )
        return OpenStep(
            number, micro_batches, plan.digest, plan.planned_at,
            StepState.COMMITTED if number in self.retained else StepState.PLANNED,
            attempt=plan.attempt, usual_loss=plan.usual_loss, cp_sizes=plan.cp_sizes,
        )  # fmt: skip

    def _newest(self, values: Sequence[tuple[str, Any]]) -> Sequence[tuple[str, Any]]:
        return values[max(0, len(values) - self._id_horizon) :]

    def _phases(self) -> tuple[int, ...]:
        """The newest, and those before it that some buffered sample still belongs to."""
        versions = [self.entries[at].sample.judged_version or 0 for at in self.buffered()]
        newest = max(self.phases, default=None)
        return tuple(sorted(p for p in self.phases if p == newest or any(v < p for v in versions)))

    def _note(self, fact: f.Fact) -> None:
        match fact:
            case f.Accepted(entry, producer, seq, given_id):
                # The core goes on counting skips in its entry; the model keeps one of its own.
                self.entries[entry.ticket] = replace(_copy(entry), producer=producer)
                self.next_ticket = max(self.next_ticket, entry.ticket + 1)
                self._known(producer).add(seq)
                self._left.discard(producer)
                if given_id is not None:
                    self._given_ids.append((given_id, entry.sample.checksum))
            case f.Planned(step, passed_over=passed_over):
                self.steps[step] = fact
                self.next_step = max(self.next_step, step + 1)
                self.withdrawn.pop(step, None)
                for ticket in passed_over:
                    self.entries[ticket].skips += 1
            case f.Committed(step, retained):
                if retained:
                    self.retained.add(step)
                    self.lazy.add(step)
                else:
                    self._forget(step)
            case f.Dropped(tickets):
                for ticket in tickets:
                    del self.entries[ticket]
                self.steps = {at: without(tickets, step) for at, step in self.steps.items()}
            case f.GroupSized(tickets, size):
                for entry in map(self.entries.__getitem__, tickets):
                    entry.sample = entry.sample._replace(group_size=size)
            case _:
                self._note_steps(fact)

    def _note_steps(self, fact: f.Fact) -> None:
        match fact:
            case f.Withdrawn(step, attempt):
                del self.steps[step]
                self.lazy.discard(step)
                self.next_step, self.withdrawn[step] = step, attempt
            case f.Resumed(after):
                rewound = {number for number in self.retained if number > after}
                self.retained -= rewound
                if rewound:
                    self.version = self.version_step = None
                self.resumed = after
            case f.CheckpointSaved(step):
                self.saved = step
                self._forget_retained(step)
            case f.RetainedEvicted(step):
                self.evicted = step
                self._forget_retained(step)
            case _:
                self._note_said(fact)

    def _note_said(self, fact: f.Fact) -> None:
        match fact:
            case f.FloorRaised(producer, floor):
                self._known(producer)
                self._floors[producer] = max(floor, self._floors[producer])
            case f.ProducerKeyed(producer, digest):
                self._known(producer)
                self._keys[producer] = digest
            case f.ProducerLeft(producer):
                self._known(producer)
                self._left.add(producer)
            case f.EndsReported(producer, phase, ended):
                self._known(producer)
                self._left.discard(producer)
                self._words[producer] = phase, ended
            case f.GroupEnded(group_id, why):
                self._ended_groups.append((group_id, why))
            case f.Releasable(objects):
                self._unneeded |= {*objects}
            case f.Deleted(objects):
                self._unneeded -= {*objects}
            case f.IncarnationBegan(producer, incarnation):
                self._incarnations[incarnation] = producer
            case f.IncarnationSwept(incarnation):
                self._incarnations.pop(incarnation, None)
            case _:
                self._note_run(fact)

    def _note_run(self, fact: f.Fact) -> None:
        match fact:
            case f.RunBegan(run_id):
                self.run_id = run_id
            case f.GenerationBegan(generation, dp_size):
                self.generation, self.dp_size, self.resumed = generation, dp_size, None
                self.was_finished = False
            case f.VersionReported(version, first_step):
                self.version, self.version_step = version, first_step
            case f.PhaseEnded(version):
                self.phases.add(version)
            case f.SchemaFixed(schema, set_by):
                self._schema, self._set_by = schema, set_by
            case f.GroupSizeSet(size):
                self.group_size = size
            case f.StreamEnded():
                self.ended = True
            case f.Finished(pending):
                self.finished, self.was_finished = pending, not pending
            case f.SpeedsMeasured():
                self._speeds = fact
            case f.CostFitted():
                self._cost = fact

    def _known(self, producer: str) -> set[int]:
        self._floors.setdefault(producer, 0)
        return self._seqs.setdefault(producer, set())

    def _forget(self, step: int) -> None:
        for ticket in self.members(step):
            del self.entries[ticket]
        del self.steps[step]

    def _forget_retained(self, through: int) -> None:
        for number in [number for number in self.retained if number <= through]:
            self.retained.remove(number)
            self._forget(number)


def without(tickets: Iterable[int], step: f.Planned) -> f.Planned:
    """The same without these."""
    kept = tuple(
        tuple(tuple(ticket for ticket in part if ticket not in tickets) for part in rank)
        for rank in step.micro_batches
    )
    return replace(step, micro_batches=kept)


def _copy(entry: Entry, *, lazy: bool = False) -> Entry:
    """lazy: of its payload only that the journal has it."""
    sample = entry.sample.in_journal() if lazy else entry.sample
    return replace(entry, sample=sample, oldest=None)  # what is not kept is found again
