"""A model of the journal: facts added up the plain way, in dictionaries."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import (
    Accepted,
    CheckpointSaved,
    Committed,
    Deleted,
    Dropped,
    Fact,
    Finished,
    FloorRaised,
    GenerationBegan,
    GroupEnded,
    GroupSized,
    GroupSizeSet,
    IncarnationBegan,
    IncarnationSwept,
    PhaseEnded,
    Planned,
    ProducerKeyed,
    ProducerLeft,
    ProducerSaid,
    Releasable,
    Resumed,
    RetainedEvicted,
    RunBegan,
    StreamEnded,
    VersionReported,
    Withdrawn,
)
from rollout_dispatcher.payload import StoredObject
from tests.journal.support import plain_entry
from tests.support.samples import span_of


class Model:
    """Facts added up in dictionaries."""

    def __init__(self, id_horizon: int = 100) -> None:
        self.id_horizon = id_horizon
        self.entries: dict[int, Entry] = {}
        self.steps: dict[int, Planned] = {}
        #: Steps that were withdrawn and are not planned again, and the last attempt at each.
        self.withdrawn: dict[int, int] = {}
        #: Steps that were ever committed, and of those the ones that are retained.
        self.lazy: set[int] = set()
        self.retained: set[int] = set()
        self.run_id, self.saved, self.evicted = "", -1, -1
        self.resumed: int | None = None
        self.next_ticket = self.next_step = self.generation = 0
        self.dp_size: int | None = None
        self.version: int | None = None
        self.version_step: int | None = None
        self.ended = self.finished = False
        self.group_size: int | None = None
        self.phases: set[int] = set()
        self.floors: dict[str, int] = {}
        self.seqs: dict[str, set[int]] = {}
        self.words: dict[str, tuple[int, bool]] = {}
        self.keys: dict[str, str] = {}
        self.left: set[str] = set()
        self.given_ids: OrderedDict[str, int | None] = OrderedDict()
        self.ended_groups: list[tuple[str, str]] = []
        self.totals: dict[str, object] = {}
        self.unneeded: set[StoredObject] = set()
        self.incarnations: dict[str, str] = {}

    def apply(self, facts: Sequence[Fact], totals: dict[str, object]) -> None:
        for fact in facts:
            self._apply(fact)
        self.totals = totals

    def buffered(self) -> list[int]:
        """Tickets in no step."""
        held = {ticket for number in self.steps for ticket in self.members(number)}
        return [ticket for ticket in self.entries if ticket not in held]

    def open(self) -> list[int]:
        """Numbers of the steps that are not committed."""
        return sorted(self.steps.keys() - self.retained)

    def members(self, number: int) -> list[int]:
        """Tickets of a step."""
        return [t for rank in self.steps[number].micro_batches for part in rank for t in part]

    def payloads(self) -> dict[int, bytes]:
        """Every payload of the log that is neither dropped nor done with, by ticket."""
        here = {at: one for at, one in self.entries.items() if one.sample.is_in_memory}
        return {at: span_of(entry.sample).tobytes() for at, entry in here.items()}

    def plain(self) -> dict[str, object]:
        """As `plain` shows what was remembered."""
        entries = {ticket: plain_entry(entry) for ticket, entry in self.entries.items()}
        return {
            "entries": [entries[ticket] for ticket in sorted(self.buffered())],
            "steps": [self._plain_step(number) for number in self.open()],
            "retained": [self._plain_step(number) for number in sorted(self.retained)],
            "single": (
                self.next_ticket, self.next_step, self.generation, self.dp_size, self.version,
                self.version_step, self.ended, self.finished, self.run_id, self.resumed,
                self.saved, self.evicted, self.group_size, dict(self.withdrawn),
            ),
            "phases": self._phases(),
            "producers": {
                name: (floor, frozenset(seq for seq in self.seqs[name] if seq >= floor))
                for name, floor in self.floors.items()
            },
            "keys": dict(self.keys),
            "left": self.left,
            "words": {name: word for name, word in self.words.items() if word != (0, False)},
            "given_ids": self._newest([*self.given_ids.items()]),
            "ended_groups": self._newest(self.ended_groups),
            "totals": self.totals,
            "unneeded": set(self.unneeded),
            "incarnations": dict(self.incarnations),
        }  # fmt: skip

    def _newest(self, values: Sequence[object]) -> tuple[object, ...]:
        return tuple(values[max(0, len(values) - self.id_horizon) :])

    def _plain_step(self, number: int) -> tuple[object, ...]:
        step, lazy = self.steps[number], number in self.lazy

        def plain_ticket(ticket: int) -> tuple[object, ...]:
            entry = self.entries[ticket]
            sample = entry.sample.in_journal() if lazy else entry.sample
            return plain_entry(replace(entry, sample=sample))

        parts = [[[plain_ticket(t) for t in part] for part in rank] for rank in step.micro_batches]
        rewound = lazy and number not in self.retained
        return (
            number, step.digest, step.planned_at, parts, rewound, step.attempt, step.usual_loss,
            step.cp_sizes,
        )  # fmt: skip

    def _phases(self) -> tuple[int, ...]:
        """The newest, and those before it that some buffered sample still belongs to."""
        versions = [self.entries[t].sample.judged_version or 0 for t in self.buffered()]
        newest = max(self.phases, default=None)
        return tuple(sorted(p for p in self.phases if p == newest or any(v < p for v in versions)))

    def _apply(self, fact: Fact) -> None:
        match fact:
            case Accepted(entry, producer, seq, given_id):
                # The core goes on counting skips in its entry; the model keeps one of its own.
                own = replace(entry, producer=producer)
                self.entries[entry.ticket] = own
                self.next_ticket = max(self.next_ticket, entry.ticket + 1)
                self.floors.setdefault(producer, 0)
                self.seqs.setdefault(producer, set()).add(seq)
                self.left.discard(producer)
                if given_id is not None:
                    self.given_ids[given_id] = entry.sample.checksum
            case FloorRaised() | ProducerKeyed() | ProducerLeft() | ProducerSaid():
                self._apply_producer(fact)
            case GroupSized() | GroupEnded():
                self._apply_group(fact)
            case Planned(step, passed_over=passed_over):
                self.steps[step] = fact
                self.next_step = max(self.next_step, step + 1)
                self.withdrawn.pop(step, None)
                for ticket in passed_over:
                    self.entries[ticket].skips += 1
            case Committed():
                self._apply_commit(fact)
            case Dropped(tickets):
                for ticket in tickets:
                    del self.entries[ticket]
                self.steps = {at: without(tickets, step) for at, step in self.steps.items()}
            case Resumed() | CheckpointSaved() | RetainedEvicted() | Withdrawn():
                self._apply_to_steps(fact)
            case _:
                self._apply_single(fact)

    def _apply_producer(
        self, fact: FloorRaised | ProducerKeyed | ProducerLeft | ProducerSaid
    ) -> None:
        self.floors.setdefault(fact.producer, 0)
        self.seqs.setdefault(fact.producer, set())
        if isinstance(fact, FloorRaised):
            self.floors[fact.producer] = max(fact.floor, self.floors[fact.producer])
        elif isinstance(fact, ProducerKeyed):
            self.keys[fact.producer] = fact.digest
        elif isinstance(fact, ProducerLeft):
            self.left.add(fact.producer)
        else:
            self.left.discard(fact.producer)
            self.words[fact.producer] = (fact.phase, fact.ended)

    def _apply_group(self, fact: GroupSized | GroupEnded) -> None:
        if isinstance(fact, GroupEnded):
            self.ended_groups.append((fact.group_id, fact.why))
            return
        for entry in map(self.entries.__getitem__, fact.tickets):
            entry.sample = entry.sample._replace(group_size=fact.size)

    def _apply_commit(self, fact: Committed) -> None:
        if fact.retained:
            self.retained.add(fact.step)
            self.lazy.add(fact.step)
        else:
            self._forget(fact.step)

    def _apply_to_steps(
        self, fact: Resumed | CheckpointSaved | RetainedEvicted | Withdrawn
    ) -> None:
        if isinstance(fact, Withdrawn):
            del self.steps[fact.step]
            self.lazy.discard(fact.step)
            self.next_step, self.withdrawn[fact.step] = fact.step, fact.attempt
            return
        if isinstance(fact, CheckpointSaved | RetainedEvicted):
            if isinstance(fact, CheckpointSaved):
                self.saved = fact.step
            else:
                self.evicted = fact.step
            for number in [number for number in self.retained if number <= fact.step]:
                self.retained.remove(number)
                self._forget(number)
            return
        rewound = {number for number in self.retained if number > fact.after}
        self.retained -= rewound
        if rewound:
            self.version = self.version_step = None
        self.resumed = fact.after

    def _forget(self, step: int) -> None:
        for ticket in self.members(step):
            del self.entries[ticket]
        del self.steps[step]

    def _apply_end(self, fact: StreamEnded | Finished) -> None:
        if isinstance(fact, Finished):
            self.finished = fact.pending
        else:
            self.ended = True

    def _apply_single(self, fact: Fact) -> None:
        match fact:
            case RunBegan(run_id):
                self.run_id = run_id
            case GenerationBegan(generation, dp_size):
                self.generation, self.dp_size, self.resumed = generation, dp_size, None
            case VersionReported(version, first_step):
                self.version, self.version_step = version, first_step
            case PhaseEnded(version):
                self.phases.add(version)
            case GroupSizeSet(size):
                self.group_size = size
            case StreamEnded() | Finished():
                self._apply_end(fact)
            case Releasable(objects):
                self.unneeded |= {*objects}
            case Deleted(objects):
                self.unneeded -= {*objects}
            case IncarnationBegan(producer, incarnation):
                self.incarnations[incarnation] = producer
            case IncarnationSwept(incarnation):
                self.incarnations.pop(incarnation, None)


def without(tickets: Sequence[int], step: Planned) -> Planned:
    """The same without these."""
    kept = tuple(
        tuple(tuple(ticket for ticket in part if ticket not in tickets) for part in rank)
        for rank in step.micro_batches
    )
    return replace(step, micro_batches=kept)
