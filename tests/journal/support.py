"""What the journal's tests share: samples, an open journal that is listened to, and a model.

`Model` adds facts up the plain way; `plain` makes what was remembered comparable with it.
"""

import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import (
    Accepted,
    CheckpointSaved,
    Committed,
    Configured,
    Dropped,
    DropReason,
    Fact,
    FloorRaised,
    Forgotten,
    GenerationBegan,
    GroupSized,
    GroupSizeSet,
    IncarnationBegan,
    IncarnationSwept,
    PhaseEnded,
    Planned,
    PostedSetting,
    ProducerKeyed,
    ProducerLeft,
    ProducerSaid,
    Remembered,
    RememberedStep,
    Resumed,
    RunBegan,
    StreamEnded,
    Unneeded,
    VersionReported,
    Withdrawn,
)
from rollout_dispatcher.errors import JournalError
from rollout_dispatcher.journal.journal import Journal
from rollout_dispatcher.journal.policy import SyncPolicy, parse_sync
from rollout_dispatcher.payload import Payload, Reference, StoredObject
from rollout_dispatcher.sample import DType, Field, Sample, Schema
from tests.support.samples import span_of

BATCH, OFF = parse_sync("batch"), parse_sync("off")
SCHEMAS = (
    Schema((Field("input_ids", DType.INT64),)),
    Schema((Field("input_ids", DType.INT32), Field("image", DType.UINT8, False, (2, 3)))),
    Schema(
        (
            Field.text("env"),
            Field("input_ids", DType.INT32),
            Field("pixels", DType.UINT8, False, (3,), ragged=True),
        )
    ),
)
OBJECTS = [StoredObject("file:///a", f"p.1/{at}", 1 << 20) for at in range(2)]
#: Wall time minus the core's clock; a power of two keeps the arithmetic exact.
WALL = 2.0**30
PATIENCE = 20.0


def payload_of(ticket: int, nbytes: int) -> memoryview:
    """Bytes that no other ticket has."""
    return memoryview(Random(ticket).randbytes(nbytes))


def accepted(
    ticket: int,
    *,
    tokens: int = 4,
    schema: Schema = SCHEMAS[0],
    producer: str = "p",
    given_id: str | None = None,
    group: int = -1,
    version: int | None = None,
    stored: StoredObject | None = None,
) -> Accepted:
    """A sample of its own bytes enters the buffer; stored: it lies in this object."""
    rows = tuple((ticket + at) % 5 for at in range(len(schema.ragged)))
    nbytes = schema.nbytes(tokens, rows)
    payload: Payload = payload_of(ticket, nbytes)
    if stored is not None:
        payload = Reference(stored, 8 * ticket, nbytes)
    sample = Sample(
        given_id or f"s-{ticket}", tokens, tokens // 2, schema, payload,
        None if group < 0 else f"g-{group}", 1 if group < 0 else 2, version, rows,
    )  # fmt: skip
    return Accepted(Entry(sample, ticket, ticket / 8, group), producer, ticket, given_id)


class Listener:
    """Waits for what a journal reports."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.heard = threading.Condition()
        self.durable = 0
        self.syncs = 0
        self.broken: JournalError | None = None
        self.order: list[str] = []
        journal.on_durable = self._on_durable
        journal.on_sync = self._on_sync
        journal.on_broken = self._on_broken

    def wait(self, lsn: int) -> None:
        """Until everything up to `lsn` is durable."""
        with self.heard:
            assert self.heard.wait_for(lambda: self.durable >= lsn, PATIENCE), "not durable"

    def wait_broken(self) -> JournalError:
        with self.heard:
            assert self.heard.wait_for(lambda: self.broken is not None, PATIENCE), "not broken"
        assert self.broken is not None
        return self.broken

    def wait_failing(self) -> JournalError:
        eventually(lambda: self.journal.failure is not None)
        assert self.journal.failure is not None
        return self.journal.failure

    def _on_durable(self, lsn: int) -> None:
        with self.heard:
            assert lsn > self.durable
            self.durable = lsn
            self.order.append("durable")
            self.heard.notify_all()

    def _on_sync(self, seconds: float) -> None:
        with self.heard:
            assert seconds >= 0
            self.syncs += 1
            self.order.append("sync")
            self.heard.notify_all()

    def _on_broken(self, error: JournalError) -> None:
        with self.heard:
            self.broken = error
            self.heard.notify_all()


def eventually(true: Callable[[], bool]) -> None:
    """Wait for what nobody reports."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def open_journal(
    directory: Path, sync: SyncPolicy = OFF, **options: Any
) -> tuple[Journal, Remembered]:
    """With small files and a clock of its own."""
    settings = {"map_bytes": 1 << 20, "segment_bytes": 16 << 10, "id_horizon": 100} | options
    return Journal.open(
        directory,
        sync,
        to_wall=lambda time: time + WALL,
        from_wall=lambda time: time - WALL,
        **settings,
    )


@contextmanager
def opened(
    directory: Path, sync: SyncPolicy = OFF, **options: Any
) -> Iterator[tuple[Journal, Listener, Remembered]]:
    """An open journal that is closed in the end."""
    journal, remembered = open_journal(directory, sync, **options)
    try:
        yield journal, Listener(journal), remembered
    finally:
        journal.close()


def as_if_killed(directory: Path, to: Path) -> Path:
    """What a process that is killed now would leave: a copy, taken while it runs."""
    shutil.copytree(directory, to)
    return to


def recovered(directory: Path, **options: Any) -> Remembered:
    """What a new process is told."""
    journal, remembered = open_journal(directory, **options)
    assert journal.close()
    return remembered


def plain_entry(entry: Entry) -> tuple[object, ...]:
    """Everything of an entry, comparable."""
    sample = entry.sample
    return (
        entry.ticket, entry.arrived, entry.group, entry.skips, sample.sample_id, sample.tokens,
        sample.loss_tokens, sample.schema, sample.payload, sample.group_id,
        sample.group_size, sample.policy_version, sample.rows, entry.producer,
    )  # fmt: skip


def plain_step(step: RememberedStep) -> tuple[object, ...]:
    """Everything of a step, comparable."""
    parts = [[[plain_entry(e) for e in part] for part in rank] for rank in step.micro_batches]
    return (step.number, step.digest, step.planned_at, parts, step.rewound, step.attempt)


def plain(remembered: Remembered) -> dict[str, object]:
    """Everything that is remembered, comparable."""
    return {
        "entries": [plain_entry(entry) for entry in remembered.entries],
        "steps": [plain_step(step) for step in remembered.steps],
        "retained": [plain_step(step) for step in remembered.retained],
        "single": (
            remembered.next_ticket, remembered.next_step, remembered.generation,
            remembered.dp_size, remembered.policy_version, remembered.policy_step,
            remembered.ended, remembered.run_id, remembered.resumed, remembered.saved,
            remembered.group_size, remembered.posted, dict(remembered.withdrawn),
        ),
        "phases": remembered.phases,
        "producers": dict(remembered.producers),
        "words": dict(remembered.words),
        "keys": dict(remembered.keys),
        "left": set(remembered.left),
        "given_ids": remembered.given_ids,
        "totals": dict(remembered.totals),
        "unneeded": set(remembered.unneeded),
        "incarnations": dict(remembered.incarnations),
    }  # fmt: skip


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
        self.run_id, self.saved = "", -1
        self.resumed: int | None = None
        self.next_ticket = self.next_step = self.generation = 0
        self.dp_size: int | None = None
        self.version: int | None = None
        self.version_step: int | None = None
        self.ended = False
        self.group_size: int | None = None
        self.posted: tuple[PostedSetting, ...] = ()
        self.phases: set[int] = set()
        self.floors: dict[str, int] = {}
        self.seqs: dict[str, set[int]] = {}
        self.words: dict[str, tuple[int, bool]] = {}
        self.keys: dict[str, str] = {}
        self.left: set[str] = set()
        self.given_ids: OrderedDict[str, None] = OrderedDict()
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
                self.version_step, self.ended, self.run_id, self.resumed, self.saved,
                self.group_size, self.posted, dict(self.withdrawn),
            ),
            "phases": self._phases(),
            "producers": {
                name: (floor, frozenset(seq for seq in self.seqs[name] if seq >= floor))
                for name, floor in self.floors.items()
            },
            "keys": dict(self.keys),
            "left": self.left,
            "words": {name: word for name, word in self.words.items() if word != (0, False)},
            "given_ids": tuple(self.given_ids)[max(0, len(self.given_ids) - self.id_horizon) :],
            "totals": self.totals,
            "unneeded": set(self.unneeded),
            "incarnations": dict(self.incarnations),
        }  # fmt: skip

    def _plain_step(self, number: int) -> tuple[object, ...]:
        step, lazy = self.steps[number], number in self.lazy

        def plain_ticket(ticket: int) -> tuple[object, ...]:
            entry = self.entries[ticket]
            sample = entry.sample.in_journal() if lazy else entry.sample
            return plain_entry(replace(entry, sample=sample))

        parts = [[[plain_ticket(t) for t in part] for part in rank] for rank in step.micro_batches]
        rewound = lazy and number not in self.retained
        return (number, step.digest, step.planned_at, parts, rewound, step.attempt)

    def _phases(self) -> tuple[int, ...]:
        """The newest, and those before it that some buffered sample still belongs to."""
        versions = [self.entries[t].sample.policy_version or 0 for t in self.buffered()]
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
                    self.given_ids[given_id] = None
            case FloorRaised() | ProducerKeyed() | ProducerLeft() | ProducerSaid():
                self._apply_producer(fact)
            case GroupSized(tickets, size):
                for entry in map(self.entries.__getitem__, tickets):
                    entry.sample = entry.sample._replace(group_size=size)
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
            case Resumed() | CheckpointSaved() | Withdrawn():
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

    def _apply_commit(self, fact: Committed) -> None:
        if fact.retained:
            self.retained.add(fact.step)
            self.lazy.add(fact.step)
        else:
            self._forget(fact.step)

    def _apply_to_steps(self, fact: Resumed | CheckpointSaved | Withdrawn) -> None:
        if isinstance(fact, Withdrawn):
            del self.steps[fact.step]
            self.lazy.discard(fact.step)
            self.next_step, self.withdrawn[fact.step] = fact.step, fact.attempt
            return
        if isinstance(fact, CheckpointSaved):
            self.saved = fact.step
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
            case Configured(posted):
                self.posted = posted
            case StreamEnded():
                self.ended = True
            case Unneeded(objects):
                self.unneeded |= {*objects}
            case Forgotten(objects):
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


class Player:
    """Plays a core: valid facts from random numbers, the same for the same seed."""

    def __init__(self, random: Random, id_horizon: int = 100) -> None:
        self.random = random
        self.model = Model(id_horizon)

    def batch(self) -> tuple[list[Fact], dict[str, object]]:
        """The next facts and totals; the model has them already."""
        facts: list[Fact] = []
        for _ in range(self.random.randrange(4)):
            more = self._facts()
            self.model.apply(more, self.model.totals)
            facts += more
        totals: dict[str, object] = {"accepted": self.model.next_ticket, "dropped": {"stale": 1}}
        self.model.totals = totals
        return facts, totals

    def _facts(self) -> list[Fact]:
        kind, random = self.random.random(), self.random
        if kind < 0.55:
            return [self._accepted(at) for at in range(random.randrange(1, 5))]
        if kind < 0.66:
            return self._planned()
        if kind < 0.68 and self.model.open():
            return self._planned_again()
        if kind < 0.71 and self.model.open():
            return self._lost()
        if kind < 0.83 and self.model.open():
            return [Committed(self.model.open()[0], retained=random.random() < 0.5)]
        if kind < 0.86 and self.model.retained:
            return [self._checkpoint()]
        if kind < 0.89 and self.model.buffered():
            buffered = self.model.buffered()
            doomed = random.sample(buffered, min(3, len(buffered)))
            if random.random() < 0.5:
                return [GroupSized(tuple(doomed), random.randrange(1, 9))]
            return [Dropped(tuple(doomed), random.choice(list(DropReason)))]
        producer = f"p-{random.randrange(3)}"
        others: list[Fact] = [
            FloorRaised(producer, random.randrange(self.model.next_ticket + 1)),
            GenerationBegan(self.model.generation + 1, random.randrange(1, 5)),
            VersionReported((self.model.version or 0) + random.randrange(2), self.model.next_step),
            ProducerSaid(producer, random.randrange(3), random.random() < 0.3),
            ProducerLeft(producer),
            ProducerKeyed(producer, f"{random.randrange(2):032x}"),
            PhaseEnded(max(self.model.phases, default=0) + random.randrange(2)),
            StreamEnded(),
            RunBegan("run"),
            Unneeded(tuple(self._stored() for _ in range(random.randrange(3)))),
            Forgotten(tuple(self._stored() for _ in range(random.randrange(3)))),
            IncarnationBegan(producer, f"{producer}.{random.randrange(2)}"),
            IncarnationSwept(f"{producer}.{random.randrange(2)}"),
            GroupSizeSet(random.choice([None, 4])),
            Configured(
                tuple(PostedSetting(f"s{at}", 1.5, None, "me") for at in range(random.randrange(3)))
            ),
        ]
        return [random.choice(others)]

    def _stored(self) -> StoredObject:
        store, number = f"file:///{self.random.randrange(2)}", self.random.randrange(4)
        return StoredObject(store, f"schlüssel/{number}", 1000 * number)

    def _checkpoint(self) -> Fact:
        step = self.random.choice(sorted(self.model.retained))
        return Resumed(step - 1) if self.random.random() < 0.5 else CheckpointSaved(step)

    def _accepted(self, at: int) -> Accepted:
        random, ticket = self.random, self.model.next_ticket + at
        named = random.random() < 0.4
        return accepted(
            ticket,
            tokens=random.choice([1, 3, 20, 150]),
            schema=random.choice(SCHEMAS),
            producer=f"p-{random.randrange(3)}",
            given_id=f"näme-{ticket}" if named else None,
            group=ticket if random.random() < 0.3 else -1,
            version=self._version(),
            stored=random.choice([None, None, *OBJECTS]),
        )

    def _version(self) -> int | None:
        """Never of a phase that has ended: admission refuses those."""
        newest = max(self.model.phases, default=None)
        if newest is None:
            return self.random.choice([None, 0, 1, 2])
        return newest + self.random.randrange(3)

    def _planned(self) -> list[Fact]:
        buffered = self.model.buffered()
        if len(buffered) < 2:
            return []
        chosen = self.random.sample(buffered, self.random.randrange(2, len(buffered) + 1))
        cut = len(chosen) // 2
        ranks = ((tuple(chosen[:cut]),), (tuple(chosen[cut:-1]), (chosen[-1],)))
        over = tuple(ticket for ticket in buffered if ticket not in chosen)
        number = self.model.next_step
        attempt = self.model.withdrawn.get(number, -1) + 1
        return [Planned(number, f"digest-{number}", number / 4, ranks, over, attempt)]

    def _planned_again(self) -> list[Fact]:
        """An open step for another number of ranks: the same samples, elsewhere."""
        number = self.random.choice(self.model.open())
        before, size = self.model.steps[number], self.random.randrange(1, 4)
        members = self.model.members(number)
        self.random.shuffle(members)
        ranks = tuple((tuple(members[rank::size]),) for rank in range(size))
        digest, attempt = f"{before.digest}+", before.attempt
        return [Planned(number, digest, before.planned_at, ranks, (), attempt)]

    def _lost(self) -> list[Fact]:
        """Samples of an open step are lost, one or all; what comes after it moves up then."""
        numbers, steps = self.model.open(), self.model.steps
        at = self.random.randrange(len(numbers))
        members = self.model.members(numbers[at])
        lost = tuple(self.random.sample(members, self.random.choice([1, len(members)])))
        left = without(lost, steps[numbers[at]])
        facts: list[Fact] = [Dropped(lost, DropReason.UNRESOLVED), _voided(left)]
        if len(lost) < len(members):
            return facts
        for empty, full in pairwise(numbers[at:]):
            moved = replace(steps[empty], micro_batches=steps[full].micro_batches)
            facts.append(_voided(moved))
        return [*facts, Withdrawn(numbers[-1], steps[numbers[-1]].attempt)]


def _voided(step: Planned) -> Planned:
    """The same, without its plan."""
    return replace(step, digest="", passed_over=(), attempt=step.attempt + 1)
