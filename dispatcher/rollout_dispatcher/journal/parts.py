"""The parts of the journal's state, as the index stores them: a sample, a step, a producer, and the
single values of a run. Payloads are in the log alone.
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
    """A sample that is buffered, or in an open or retained step; fields in the order of its row.

    arrived: wall time. segment: 0 for a payload in a payload store. offset: in the segment, or in
    the store's object. rows: of ragged fields. step: the open or retained step, -1 for none.
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
        """From a row of the index; objects: known ones, so that each exists once in memory."""
        kept = cls(*row)
        if kept.stored is not None:
            stored = StoredObject(*row[-1])
            kept.stored = objects.setdefault(stored, stored)
        return kept

    def row(self) -> Row:
        """The row of the index."""
        return [
            *_STORED_ALWAYS(self),
            *([self.rows] if self.rows or self.stored else ()),
            *([astuple(self.stored)] if self.stored else ()),
        ]

    @property
    def reference(self) -> Reference | None:
        """The place of its payload in a payload store; None if the log has it."""
        return None if self.stored is None else Reference(self.stored, self.offset, self.nbytes)

    def entry(self, schema: Schema, payload: Payload, arrived: float) -> Entry:
        """The entry of the core's buffer."""
        sample = Sample(
            self.sample_id, self.tokens, self.loss_tokens, schema, payload, self.group_id,
            self.group_size, self.policy_version, tuple(self.rows), self.staleness_exempt,
        )  # fmt: skip
        return Entry(sample, self.ticket, arrived, self.group, self.skips, self.producer)


#: The values of every row; only some have the values behind these.
_STORED_ALWAYS = attrgetter(*LiveSample.__slots__[: LiveSample.__slots__.index("rows")])


class Stage(StrEnum):
    """The state of a step; payloads of one that was ever committed are not in memory."""

    OPEN = "open"
    RETAINED = "retained"
    REWOUND = "rewound"


@dataclass(slots=True)
class StepRecord:
    """An open or retained step, fields in the order of its row.

    digest: empty for a step without a plan. planned_at: wall time. micro_batches: tickets by DP
    rank and micro-batch. usual_loss: loss tokens of the mean arrival when it was planned, 0 if not
    known. cp_sizes: ranks that train each micro-batch together; empty if one trains each.
    """

    digest: str
    planned_at: float
    micro_batches: Sequence[Sequence[Sequence[int]]]
    stage: str = Stage.OPEN
    attempt: int = 0
    usual_loss: float = 0.0
    cp_sizes: Sequence[Sequence[int]] = ()

    def row(self) -> Row:
        """The row of the index."""
        row = list(astuple(self))
        return row if self.cp_sizes else row[:-1]

    def tickets(self) -> Iterator[int]:
        """All its tickets."""
        return (ticket for rank in self.micro_batches for part in rank for ticket in part)


@dataclass(slots=True)
class ProducerRecord:
    """Accepted numbers at or above `floor`, and the ends that the producer has announced.

    phase: the newest that it has ended, 0 for none. ended: whether it has ended its stream. key:
    the digest of its key, if it has sent one. left: its last message was a goodbye.
    """

    floor: int = 0
    accepted: set[int] = field(default_factory=set)
    phase: int = 0
    ended: bool = False
    key: str = ""
    left: bool = False

    def row(self, name: str) -> Row:
        """The row of the index."""
        return [
            name, self.floor, sorted(self.accepted), self.phase, self.ended, self.key, self.left,
        ]  # fmt: skip

    def raise_floor(self, floor: int) -> None:
        """Forget numbers that the producer never sends again."""
        if floor > self.floor:
            self.floor = floor
            self.accepted = {seq for seq in self.accepted if seq >= floor}


@dataclass(slots=True)
class Changed:
    """Changes since the last snapshot; samples by shelf."""

    shelves: set[int] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    producers: set[str] = field(default_factory=set)
    schemas: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Live:
    """Number and payload bytes of the kept samples of one segment."""

    samples: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Ledger:
    """Single values, and collections that stay small.

    withdrawn: steps that were withdrawn and not planned again, with their last attempt. unneeded:
    by store and key, the bytes of objects that workers have to release. incarnations: those whose
    objects are not swept, with their producers.
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
