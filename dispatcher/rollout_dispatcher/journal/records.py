"""Facts as rows of plain JSON values, and batches of them.

A row is a list: its kind, then its values in a fixed order. Rows are made on the caller's thread,
when facts are appended, as the core goes on changing its entries while a batch is queued. They do
not change afterwards, except for checksums, which the writer fills in.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from rollout_dispatcher.core.facts import (
    Accepted,
    CostFitted,
    Deleted,
    Fact,
    Planned,
    Releasable,
    SchemaFixed,
    SpeedsMeasured,
)
from rollout_dispatcher.payload import InMemory, Reference, StoredObject
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.spans import aligned

#: A JSON array; the kind determines its shape.
Row = list[Any]

#: Kinds of rows that are no facts, or have other values than their fields.
SCHEMA, MOVED, OBJECT, REFERENCED = "schema", "moved", "object", "referenced"
ACCEPTED, FIXED = Accepted.kind, SchemaFixed.kind

#: Indices of payload size and checksum in accepted and moved rows.
NBYTES, CHECKSUM = 2, 3
#: Indices in an accepted row: of the producer, whose values follow those of the sample; and of the
#: rows of ragged fields, if there are any.
PRODUCER, ROWS = 15, 19
#: Index in a referenced row of the offset in its object, which the last object row before it names.
#: The rest is as in an accepted row, with rows of ragged fields even if there are none.
OFFSET = 20
#: Most bytes of JSON for a character (two \\uXXXX), a number and its comma, and an accepted row
#: without names; and of a block besides rows, totals and payloads.
_CHARACTER_BYTES, _NUMBER_BYTES, _ACCEPTED_BYTES, _BLOCK_BYTES = 12, 26, 252, 128


@dataclass(slots=True)
class Batch:
    """The rows of one `append`, ready to be written.

    payloads: of the accepted rows, in their order. nbytes: of the payloads, each aligned. most:
    upper bound of its bytes in the log.
    """

    lsn: int
    rows: list[Row]
    payloads: list[memoryview]
    totals: str
    nbytes: int = field(init=False)
    most: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(aligned(payload.nbytes) for payload in self.payloads)
        self.most = self.nbytes + most_bytes(self.rows, self.totals)


def most_bytes(rows: Sequence[Row], totals: str) -> int:
    """Upper bound of a block's bytes in the log, without its payloads."""
    found = _BLOCK_BYTES + 2 * len(totals)
    for row in rows:
        if row[0] in {ACCEPTED, REFERENCED}:  # the many rows, and those with users' names
            names = len(row[6]) + len(row[7] or "") + len(row[PRODUCER]) + len(row[ROWS - 2] or "")
            found += _ACCEPTED_BYTES + _CHARACTER_BYTES * names
            found += sum(map(_most_bytes_of, row[ROWS:]))
        else:
            found += _most_bytes_of(row)
    return found


def _most_bytes_of(value: object) -> int:
    if isinstance(value, str):
        return _CHARACTER_BYTES * len(value) + 4
    if not isinstance(value, (list, tuple)) or not value:
        return _NUMBER_BYTES
    if isinstance(value[0], int):  # maybe thousands of tickets
        return _NUMBER_BYTES * (len(value) + 1)
    return _NUMBER_BYTES + sum(map(_most_bytes_of, value))


class Encoder:
    """Turns facts into rows. A schema is written once, then referred to by its number."""

    def __init__(self, schemas: Mapping[int, Schema], to_wall: Callable[[float], float]) -> None:
        self._numbers = {schema: number for number, schema in schemas.items()}
        self._to_wall = to_wall
        self._last: tuple[Schema | None, int] = (None, -1)
        self._stored: StoredObject | None = None

    def batch(self, lsn: int, facts: Sequence[Fact], totals: Mapping[str, object]) -> Batch:
        """Make a batch. Raises TypeError or ValueError for totals that are not JSON."""
        text = json.dumps(totals)
        rows: list[Row] = []
        payloads: list[memoryview] = []
        self._stored = None  # each batch names its objects again
        for fact in facts:
            if isinstance(fact, Accepted):
                payload = fact.entry.sample.payload
                if isinstance(payload, Reference):
                    self._referenced(fact, payload, rows)
                else:
                    assert isinstance(payload, InMemory), "nothing else is admitted"
                    rows.append(self._accepted(fact, rows))
                    payloads.append(payload)
            elif isinstance(fact, SchemaFixed):
                number = self._number(fact.schema, rows)
                rows.append([FIXED, number, fact.set_by])
            else:
                rows.append(self._row(fact))
        return Batch(lsn, rows, payloads, text)

    def _accepted(self, fact: Accepted, before: list[Row]) -> Row:
        entry, sample = fact.entry, fact.entry.sample
        return [
            ACCEPTED, entry.ticket, sample.nbytes, 0, sample.tokens, sample.loss_tokens,
            sample.sample_id, sample.group_id, sample.group_size, sample.policy_version,
            sample.staleness_exempt, self._to_wall(entry.arrived),
            self._number(sample.schema, before), entry.group, entry.skips, fact.producer,
            fact.seq, fact.given_id, sample.checksum,
            *([sample.rows] if sample.rows else ()),
        ]  # fmt: skip

    def _referenced(self, fact: Accepted, payload: Reference, rows: list[Row]) -> None:
        """Append a row with the payload's place, after one of its object if that has changed."""
        if payload.stored is not self._stored:
            self._stored = payload.stored
            rows.append([OBJECT, *astuple(payload.stored)])
        accepted = self._accepted(fact, rows)[1:ROWS]
        rows.append([REFERENCED, *accepted, fact.entry.sample.rows, payload.offset])

    def _row(self, fact: Fact) -> Row:
        """The fact's kind and fields, as plain values."""
        row: Row = [fact.kind, *(getattr(fact, name) for name in fact.__slots__)]
        match fact:
            case Planned():
                row[3] = self._to_wall(fact.planned_at)
                if fact.cp_sizes:
                    return row
                return row[:8] if fact.attempt or fact.usual_loss else row[:6]
            case CostFitted(version, cost, error, first_step):
                return [fact.kind, [version, *astuple(cost), error, first_step]]
            case SpeedsMeasured(generation, slowness, first_step):
                return [fact.kind, [generation, list(slowness), first_step]]
            case Releasable(objects):
                row[1] = list(map(astuple, objects))
            case Deleted(objects):
                row[1] = [(stored.store, stored.key) for stored in objects]
        return row

    def _number(self, schema: Schema, before: list[Row]) -> int:
        last, number = self._last
        if schema is last:  # usually all samples of a run share one object
            return number
        known = self._numbers.get(schema)
        if known is None:
            known = self._numbers[schema] = len(self._numbers)
            before.append([SCHEMA, known, schema_row(schema)])
        self._last = (schema, known)
        return known


def schema_row(schema: Schema) -> Row:
    """A schema as plain values; ragged fields have a fifth."""
    return [
        [item.name, item.dtype, item.per_token, item.shape, *([True] if item.ragged else ())]
        for item in schema.fields
    ]


def schema_of(row: Iterable[Row]) -> Schema:
    """The inverse of `schema_row`."""
    return Schema(
        tuple(
            Field(name, DType(dtype), per_token, tuple(shape), *ragged)
            for name, dtype, per_token, shape, *ragged in row
        )
    )
