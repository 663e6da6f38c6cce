"""What the journal remembers: a sample, a step, a producer, and the single values of a run.

Each is as the index stores it. Invariant: the payload is not among it, only where the log has it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Self

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.journal.records import Row
from rollout_dispatcher.payload import Payload, Reference, StoredObject
from rollout_dispatcher.sample import Sample, Schema


@dataclass(slots=True)
class LiveSample:
    """A sample that is neither done with nor dropped; the order of the fields is the row's.

    arrived: wall time. offset: in its segment, or in the object of a payload store, and then there
    is no segment: 0. rows: of ragged fields. step: the open or retained step that holds it, -1 for
    none.
    """

    ticket: int
    nbytes: int
    checksum: int
    tokens: int
    loss_tokens: int
    sample_id: str
    group_id: str | None
    group_size: int
    policy_version: int | None
    staleness_exempt: bool
    arrived: float
    schema: int
    group: int
    skips: int
    producer: str
    segment: int
    offset: int
    rows: Sequence[int] = ()
    stored: StoredObject | None = None
    step: int = -1

    @classmethod
    def of(cls, row: Row, objects: dict[StoredObject, StoredObject]) -> Self:
        """What the index has stored; objects: those that are known, so that each is there once."""
        kept = cls(*row)
        if kept.stored is not None:
            stored = StoredObject(*row[-1])
            kept.stored = objects.setdefault(stored, stored)
        return kept

    def row(self) -> Row:
        """As the index stores it."""
        return [
            *_STORED_ALWAYS(self),
            *([self.rows] if self.rows or self.stored else ()),
            *([astuple(self.stored)] if self.stored else ()),
        ]

    @property
    def reference(self) -> Reference | None:
        """Where its payload is, if that is in a payload store."""
        return None if self.stored is None else Reference(self.stored, self.offset, self.nbytes)

    def entry(self, schema: Schema, payload: Payload, arrived: float) -> Entry:
        """As the core has it."""
        sample = Sample(
            self.sample_id, self.tokens, self.loss_tokens, schema, payload, self.group_id,
            self.group_size, self.policy_version, tuple(self.rows), self.staleness_exempt,
        )  # fmt: skip
        return Entry(sample, self.ticket, arrived, self.group, self.skips, self.producer)


#: The values that each row has; those behind them are few samples' own.
_STORED_ALWAYS = attrgetter(*LiveSample.__slots__[: LiveSample.__slots__.index("rows")])


class Stage(StrEnum):
    """Where a step stands; payloads of one that was ever committed are not held in memory."""

    OPEN = "open"
    RETAINED = "retained"
    REWOUND = "rewound"


@dataclass(slots=True)
class StepRecord:
    """An open or retained step: digest, wall time of its plan, tickets by DP rank and micro-batch.

    The order of the fields is the index's. digest: empty of a step that has lost its plan.
    usual_loss: loss tokens of the mean arrival when it was planned, 0 where that is not known.
    cp_sizes: ranks that train each micro-batch together; empty where each is one rank's own.
    """

    digest: str
    planned_at: float
    micro_batches: Sequence[Sequence[Sequence[int]]]
    stage: str = Stage.OPEN
    attempt: int = 0
    usual_loss: float = 0.0
    cp_sizes: Sequence[Sequence[int]] = ()

    def row(self) -> Row:
        """As the index stores it."""
        row = list(astuple(self))
        return row if self.cp_sizes else row[:-1]

    def tickets(self) -> Iterator[int]:
        """Every ticket in it."""
        return (ticket for rank in self.micro_batches for part in rank for ticket in part)


@dataclass(slots=True)
class ProducerRecord:
    """Numbers at or above `floor` that were accepted, and what the producer said last.

    phase: the newest one that it has ended, 0 for none. ended: whether its stream. key: the digest
    of its key, if it has shown one. left: it has said goodbye, and nothing since.
    """

    floor: int = 0
    accepted: set[int] = field(default_factory=set)
    phase: int = 0
    ended: bool = False
    key: str = ""
    left: bool = False

    def row(self, name: str) -> Row:
        """As the index stores it."""
        return [
            name, self.floor, sorted(self.accepted), self.phase, self.ended, self.key, self.left,
        ]  # fmt: skip

    def raise_floor(self, floor: int) -> None:
        """Forget what never comes again."""
        if floor > self.floor:
            self.floor = floor
            self.accepted = {seq for seq in self.accepted if seq >= floor}


@dataclass(slots=True)
class Changed:
    """What the index does not have yet, or has too much of; samples by shelf."""

    shelves: set[int] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    producers: set[str] = field(default_factory=set)
    schemas: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Live:
    """Kept samples of one segment, and their bytes."""

    samples: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Ledger:
    """The single values, and what is a few as a rule.

    withdrawn: pairs of a step that was withdrawn and not planned again, and the last attempt at it.
    unneeded: by store, then by key, how many bytes each object has that is to be released: workers
    empty the list as it grows. incarnations: those that are not swept, with their producers.
    """

    next_ticket: int = 0
    next_step: int = 0
    withdrawn: list[tuple[int, int]] = field(default_factory=list)
    run_id: str = ""
    generation: int = 0
    resumed: int | None = None
    saved: int = -1
    evicted: int = -1
    dp_size: int | None = None
    policy_version: int | None = None
    policy_step: int | None = None
    group_size: int | None = None
    cost: Row | None = None
    speeds: Row | None = None
    schema: int | None = None
    set_by: str = ""
    phases: list[int] = field(default_factory=list)
    ended: bool = False
    finished: bool = False
    was_finished: bool = False
    unneeded: dict[str, dict[str, int]] = field(default_factory=dict)
    incarnations: dict[str, str] = field(default_factory=dict)
    totals: str = "{}"
