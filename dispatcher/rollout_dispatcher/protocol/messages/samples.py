"""What messages that carry samples have in common: the samples' fields, and facts about each.

Facts (`tokens`, `sample_ids`, ...) come as lists with one entry a sample.
"""

from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field as Declared
from pydantic import model_validator

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Payload, Reference, StoredObject
from rollout_dispatcher.protocol.messages.base import (
    Count,
    Extent,
    Message,
    Name,
    Part,
    Rows,
    Tokens,
    Total,
    Version,
)
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.spans import RowsByField

#: Samples of one push. To read and decide on as many takes some milliseconds, in which nobody else
#: is heard; a larger batch is pushed in parts.
MAX_SAMPLES = 1024
#: Fields of a sample; far above what any trainer reads.
MAX_FIELDS = 64
#: Dimensions of a field, without that of tokens.
MAX_DIMENSIONS = 8
#: Of an object's key; no longer one can be pushed.
MAX_KEY_LETTERS = 512
#: Address of a payload store.
StoreAddress = Annotated[str, Declared(min_length=1, max_length=1024)]
#: Of an object in its store.
Key = Annotated[str, Declared(min_length=1, max_length=MAX_KEY_LETTERS)]
#: An object, by its index, and a byte in it.
Place = Annotated[tuple[Count, Count], Declared(strict=False)]
#: Bytes of a row of a ragged field: far above any frame, which bounds rows that are there, and far
#: below where a tensor of no rows overflows in a DP rank.
MAX_ROW_BYTES = 1 << 40


@lru_cache(maxsize=64)
def _schema(fields: tuple[Field, ...]) -> Schema:
    """One object a schema, so that comparing the schemas of samples costs next to nothing.

    Raises ProtocolError for a field of which nobody could say how large it is, or how to read it.
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


class FieldHeader(Part):
    """One tensor of every sample.

    name: of the field.
    dtype: type of its elements, little endian.
    per_token: whether the first dimension is the sample's tokens, followed by `shape`; if not,
        and if it is not ragged, `shape` is all there is.
    shape: its dimensions, without that of tokens or rows.
    ragged: true if the first dimension is a number of rows of each sample's own, followed by
        `shape`; left out otherwise. A field of type str is ragged, and its rows are one text a
        sample, in UTF-8.
    """

    name: Name
    dtype: Annotated[DType, Declared(strict=False)]
    per_token: bool = True
    shape: list[Extent] = Declared(default_factory=list, max_length=MAX_DIMENSIONS)
    ragged: Literal[True] | None = None


class HasFields(Message):
    """The fields that samples share.

    fields: of every sample, in the order in which they lie in its span.
    """

    fields: Annotated[list[FieldHeader], Declared(min_length=1, max_length=MAX_FIELDS)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if len({field.name for field in self.fields}) != len(self.fields):
            raise ValueError("a field is named twice")
        return self

    @cached_property
    def schema_(self) -> Schema:
        """The schema that all these samples share."""
        return _schema(
            tuple(
                Field(item.name, item.dtype, item.per_token, tuple(item.shape), bool(item.ragged))
                for item in self.fields
            )
        )


class SchemaKnown(HasFields):
    """It is decided which fields samples have: with others they are refused from now on.

    Said to producers with the capability `schema`. A client makes values of another type the one
    that is told where they stay what they are: the dispatcher does not look at them.

    set_by: in words, who has decided.
    """

    type_code = 25
    set_by: str


class ObjectHeader(Part):
    """An object of a payload store.

    store: the store's address, one of the welcome's `payload_stores`.
    key: of the object there; it begins with the incarnation of the producer that has put it.
    nbytes: of the whole object.
    """

    store: StoreAddress
    key: Key
    nbytes: Total


class HasSamples(Message):
    """Facts about samples.

    tokens: of each sample.
    loss_tokens: tokens of each that the loss counts; never the first, which nothing predicts.
    sample_ids: what each is known by.
    group_ids: the group of each, null for none; left out where no sample has one.
    policy_versions: version of the weights that wrote the oldest token of each; left out where
        none is known.
    rows: of each ragged field by its name, those of each sample; left out where no field is ragged.
    objects: of payload stores, that spans of these samples lie in, with the capability
        `references`; left out where all samples are in the frame's payload.
    places: of each sample the index of its object and the byte there that its span begins at; null
        if it is in the frame's payload, which has these samples alone. Left out with `objects`.
    """

    #: The lists that have one entry a sample, beside `tokens`.
    each: ClassVar[tuple[str, ...]] = (
        "loss_tokens",
        "sample_ids",
        "group_ids",
        "policy_versions",
        "places",
    )
    tokens: list[Tokens]
    loss_tokens: list[Count]
    sample_ids: list[Name]
    group_ids: list[Name | None] | None = None
    policy_versions: list[Version | None] | None = None
    rows: Annotated[dict[Name, list[Rows]], Declared(max_length=MAX_FIELDS)] | None = None
    objects: Annotated[list[ObjectHeader], Declared(min_length=1)] | None = None
    places: list[Place | None] | None = None

    @model_validator(mode="after")
    def _lists_agree(self) -> Self:
        size = len(self.tokens)
        for name in self.each:
            values = getattr(self, name)
            if values is not None and len(values) != size:
                raise ValueError(f"{name} has {len(values)} entries for {size} samples")
        if self.rows is not None:
            self._rows_agree(self.rows, size)
        self._places_agree()
        return self

    def _places_agree(self) -> None:
        if (self.objects is None) != (self.places is None):
            raise ValueError("objects and places come together, or neither")
        if self.objects is None or self.places is None:
            return
        if max((place[0] for place in self.places if place), default=-1) >= len(self.objects):
            raise ValueError(f"a place is in none of {len(self.objects)} objects")

    def _rows_agree(self, rows: dict[str, list[int]], size: int) -> None:
        for name, values in rows.items():
            if len(values) != size:
                raise ValueError(f"rows of {name} has {len(values)} entries for {size} samples")

    def rows_of(self, schema: Schema) -> RowsByField:
        """Of each ragged field of the schema the rows of each sample.

        Raises ProtocolError where they are given of other fields than those.
        """
        given = self.rows or {}
        if not given and not schema.ragged:
            return ()
        if len(given) != len(schema.ragged) or not all(map(given.__contains__, schema.ragged)):
            raise ProtocolError(
                f"{type(self).__name__} has rows of {_listed(given)}, the ragged fields are "
                f"{_listed(schema.ragged)}"
            )
        return [given[name] for name in schema.ragged]

    def references(self, schema: Schema) -> list[Reference | None]:
        """Where the span of each sample is that lies in a payload store; None for one in the frame.

        Raises ProtocolError for a span that reaches beyond its object.
        """
        objects = [StoredObject(item.store, item.key, item.nbytes) for item in self.objects or ()]
        sizes, found = schema.sizes(self.tokens, self.rows_of(schema)), list[Reference | None]()
        for index, (place, nbytes) in enumerate(zip(self.places or (), sizes, strict=True)):
            if place is None:
                found.append(None)
                continue
            stored, offset = objects[place[0]], place[1]
            if offset + nbytes > stored.nbytes:
                raise ProtocolError(
                    f"the span of sample {self.sample_ids[index]} has {nbytes} bytes and begins at "
                    f"byte {offset} of the object {stored.key}, which has {stored.nbytes}"
                )
            found.append(Reference(stored, offset, nbytes))
        return found

    def rows_in_words(self) -> str:
        """How many there are of each ragged field, for an error message."""
        found = ", ".join(f"{name} {sum(rows)}" for name, rows in (self.rows or {}).items())
        return f"; rows: {found}" if found else ""


def places_of(payloads: Iterable[Payload | None]) -> dict[str, Any]:
    """What a header says of samples with these payloads: `objects` and `places`.

    All but references are taken to be in the frame's payload.
    """
    objects: dict[StoredObject, int] = {}
    places = [
        (objects.setdefault(payload.stored, len(objects)), payload.offset)
        if isinstance(payload, Reference)
        else None
        for payload in payloads
    ]
    headers = [ObjectHeader(store=at.store, key=at.key, nbytes=at.nbytes) for at in objects]
    return {"objects": headers, "places": places}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


@lru_cache(maxsize=64)
def field_headers(schema: Schema) -> list[FieldHeader]:
    """A schema as it goes over the wire; the same list for all who ask, so do not change it."""
    return [
        FieldHeader(
            name=item.name,
            dtype=item.dtype,
            per_token=item.per_token,
            shape=list(item.shape),
            ragged=True if item.ragged else None,
        )
        for item in schema.fields
    ]
