"""A sample as the dispatcher sees it: metadata and one opaque span of tensor bytes.

The dispatcher never decodes payloads. A `Schema` says which fields a sample has, and with that, its
token count and the rows of its ragged fields where each lies in its span (`spans`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import count
from math import prod
from typing import NamedTuple, Self
from zlib import crc32

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import InJournal, InMemory, Payload, Reference, WithProducer
from rollout_dispatcher.spans import ROWS, SAMPLES, TOKENS, SpanLayout

#: Group sizes that are no number of members: nobody has said; said when the group is closed.
SIZE_UNKNOWN, SIZE_AT_CLOSE = 0, -1

#: Names that a micro-batch computes by itself; a field of that name would hide or be hidden.
RESERVED = frozenset({"cu_seqlens", "max_seqlen", "loss_weights", "loss_scale", "loss_scales"})
#: Behind the name of a ragged field it names where the rows of each sample begin.
CU_ROWS = "_cu_rows"
#: Differences between schemas that are told.
NAMED = 8
#: What is told of a sample beside its fields; as a field it would be a tensor that nobody asks for.
METADATA = frozenset({"sample_id", "group_id", "group_size", "policy_version", "staleness_exempt"})


def is_reserved(name: str) -> bool:
    """Whether a micro-batch computes something of this name by itself."""
    return name in RESERVED or name.endswith(CU_ROWS)


class Outcome(StrEnum):
    """What became of a pushed sample.

    DUPLICATE: there was a sample of this id before, from whichever producer. CONFLICT: the same,
    and its content was another; the first is kept. REFUSED: it is not acceptable. FULL: there is no
    room for it now.
    """

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    REFUSED = "refused"
    FULL = "full"


class DType(StrEnum):
    """Element types that may travel; names are torch's and numpy's, and Python's for text.

    STR: a byte of UTF-8. A field of it is ragged, and its rows are the text of a sample.
    """

    BOOL = "bool"
    UINT8 = "uint8"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    STR = "str"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.BOOL: 1,
    DType.UINT8: 1,
    DType.INT8: 1,
    DType.STR: 1,
    DType.INT16: 2,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT32: 4,
    DType.FLOAT32: 4,
    DType.INT64: 8,
    DType.FLOAT64: 8,
}


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a sample.

    per_token: the tensor's first dimension is the sample's token count, followed by `shape`.
    ragged: it is a number of rows that each sample has for itself, 0 or more, followed by `shape`;
    never together with `per_token`. With neither, its whole shape is `shape`, the same for every
    sample.
    """

    name: str
    dtype: DType
    per_token: bool = True
    shape: tuple[int, ...] = ()
    ragged: bool = False

    @classmethod
    def text(cls, name: str) -> Self:
        """One text a sample."""
        return cls(name, DType.STR, per_token=False, ragged=True)

    @property
    def is_text(self) -> bool:
        """Whether it is one text a sample."""
        return self.dtype is DType.STR

    def __str__(self) -> str:
        """Its type and shape, in words."""
        if self.per_token:
            return f"{self.dtype}[{', '.join(['tokens', *map(str, self.shape)])}]"
        if self.ragged and not self.is_text:
            return f"{self.dtype}[{', '.join(['rows', *map(str, self.shape)])}] per sample"
        shape = f"[{', '.join(map(str, self.shape))}]" if self.shape else ""
        return f"{self.dtype}{shape} per sample"

    @property
    def unit(self) -> int:
        """Bytes a token for a per-token field, a row for a ragged one, a sample otherwise."""
        return prod(self.shape) * self.dtype.itemsize

    def nbytes(self, tokens: int, rows: int = 0) -> int:
        """Bytes of this field in a sample of so many tokens, and rows if it is ragged."""
        return self.unit * (tokens if self.per_token else rows if self.ragged else 1)


@dataclass(frozen=True)
class Schema(SpanLayout):
    """The fields that every sample of a run has, in the order in which they lie in its span."""

    fields: tuple[Field, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.fields)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Field names in span order."""
        return tuple(item.name for item in self.fields)

    @cached_property
    def by_name(self) -> dict[str, Field]:
        """The fields by name."""
        return {item.name: item for item in self.fields}

    @cached_property
    def ragged(self) -> tuple[str, ...]:
        """The names of the ragged fields, in span order: that of a sample's `rows`."""
        return tuple(item.name for item in self.fields if item.ragged)

    @cached_property
    def units(self) -> tuple[tuple[int, int], ...]:
        """Of each field its unit, and what it has that many bytes for, as `SpanLayout` says."""
        rows = count(ROWS)
        return tuple(
            (item.unit, TOKENS if item.per_token else next(rows) if item.ragged else SAMPLES)
            for item in self.fields
        )

    def difference(self, other: "Schema") -> str:
        """How `other` differs from this schema, field by field, in words for an error message."""
        ours, theirs = self.by_name, other.by_name
        found = [
            f"{item.name} is missing ({item})" for item in self.fields if item.name not in theirs
        ]
        for name, item in theirs.items():
            if name not in ours:
                found.append(f"{name} is unexpected ({item})")
            elif item != ours[name]:
                found.append(f"{name} is {item}, not {ours[name]}")
        more = len(found) - NAMED
        if more > 0:
            found[NAMED:] = [f"and {more} more"]
        return "; ".join(found) or f"its fields come in the order {', '.join(other.names)}"


#: Bytes of a row of a ragged field: far above any frame, which bounds rows that are there, and far
#: below where a tensor of no rows overflows in a DP rank.
MAX_ROW_BYTES = 1 << 40


@lru_cache(maxsize=64)
def schema_of(fields: tuple[Field, ...]) -> Schema:
    """The schema of these fields; one object each, as comparing these costs next to nothing.

    Raises ProtocolError for a field whose size or form nobody could tell.
    """
    for item in fields:
        if item.ragged and item.per_token:
            raise ProtocolError(f"field {item.name} is ragged, and has a row a token at once")
        if item.is_text and item != Field.text(item.name):
            raise ProtocolError(f"field {item.name} is text: one a sample, ragged and of no shape")
        if item.ragged and item.unit > MAX_ROW_BYTES:
            raise ProtocolError(
                f"a row of field {item.name}, {item.shape}, is larger than any frame"
            )
    return Schema(fields)


def content_checksum(span: Iterable[bytes | bytearray | memoryview], *facts: object) -> int:
    """CRC-32 of a sample's content: it tells a sample that is pushed again from another one.

    span: its bytes, in pieces; none of one that lay in a payload store before it was pushed. facts:
    tokens, rows, group id and policy version. 10 us for 26 kB.
    """
    found = crc32(repr(facts).encode())
    for piece in span:
        found = crc32(piece, found)
    return found


class Sample(NamedTuple):
    """One finished rollout; a tuple, as there are many and a dataclass takes five times as long.

    payload: the span described by `schema`, `schema.nbytes(tokens, rows)` bytes, or where it is.
    loss_tokens: tokens that the loss counts, 0 to `tokens` - 1: the first is never a target.
    group_size: members that `group_id` will have in the end, or a word of its own, see
        `SIZE_AT_CLOSE`; 1 without a group.
    policy_version: version of the weights that wrote its oldest token; None if not tracked.
    rows: of each ragged field, in the order of the schema.
    staleness_exempt: it never is too old, whatever its version.
    checksum: `content_checksum` of one whose id its user gave; None: not known.
    """

    sample_id: str
    tokens: int
    loss_tokens: int
    schema: Schema
    payload: Payload
    group_id: str | None = None
    group_size: int = 1
    policy_version: int | None = None
    rows: tuple[int, ...] = ()
    staleness_exempt: bool = False
    checksum: int | None = None

    @property
    def judged_version(self) -> int | None:
        """The policy version by which it may be too old, or belong to a phase; None without one."""
        return None if self.staleness_exempt else self.policy_version

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, wherever it is."""
        return self.payload.nbytes

    @property
    def is_in_memory(self) -> bool:
        """Whether the payload is."""
        return isinstance(self.payload, InMemory)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the payload takes."""
        return self.payload.nbytes if isinstance(self.payload, InMemory) else 0

    @property
    def footprint(self) -> tuple[int, int]:
        """Bytes of memory, and of a payload store, that the payload takes."""
        payload = self.payload
        if isinstance(payload, InMemory):
            return payload.nbytes, 0
        return 0, payload.nbytes if isinstance(payload, Reference) else 0

    def in_journal(self) -> "Sample":
        """The same with its payload in the journal alone, if it was in memory."""
        return self._replace(payload=InJournal(self.nbytes)) if self.is_in_memory else self

    def with_producer(self) -> "Sample":
        """The same with its payload let go, if it was in memory: its producer sends it again."""
        return self._replace(payload=WithProducer(self.nbytes)) if self.is_in_memory else self

    def __repr__(self) -> str:
        shown = {name: value for name, value in self._asdict().items() if name != "payload"}
        return f"Sample({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class SamplesByField(NamedTuple):
    """Some samples, field by field in the order of `Sample`: for what is asked of all at once."""

    sample_ids: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    loss_tokens: tuple[int, ...] = ()
    schemas: tuple[Schema, ...] = ()
    payloads: tuple[Payload, ...] = ()
    group_ids: tuple[str | None, ...] = ()
    group_sizes: tuple[int, ...] = ()
    policy_versions: tuple[int | None, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    staleness_exempt: tuple[bool, ...] = ()
    checksums: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Self:
        """These samples, which takes some twentieth of a microsecond each."""
        return cls(*zip(*samples, strict=True))
