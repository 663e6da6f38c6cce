"""Samples that lie in a payload store, as JSON: what `POST /v1/samples` takes instead of tensors.

    {"reference": {"store": "file:///mnt/rollouts", "key": "web-7c1e/17", "nbytes": 48},
     "fields": ["input_ids:int64", "loss_mask:bool"], "tokens": 5, "loss_tokens": 3}

The object is there before its sample is pushed, and has no other: so one that is answered `full` is
its client's still, whatever becomes of others. `fields` says what lies in the sample's span, as
`--fields` does and in the order of the span, which is that of their names: nobody looks into it.
Where the span ends follows from them, from the tokens and from the rows of ragged fields.
"""

import uuid
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict
from pydantic import Field as Declared

from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol.messages import (
    MAX_FIELDS,
    MAX_NAME,
    Count,
    Extent,
    Key,
    Name,
    Rows,
    StoreAddress,
    Tokens,
    Total,
    Version,
)
from rollout_dispatcher.sample import SIZE_AT_CLOSE, SIZE_NOT_TOLD, Sample, Schema, content_checksum
from rollout_dispatcher.service.config.values import schema_of
from rollout_dispatcher.service.http.tensors import FieldRefused, Reading

#: What a `group_size` says that is told when the group is closed.
AT_CLOSE: Final = "at-close"


class Metadata(BaseModel):
    """Of one sample."""

    model_config = ConfigDict(extra="forbid", strict=True)
    sample_id: Name | None = None
    group_id: Name | None = None
    group_size: Extent | Literal["at-close"] | None = None
    policy_version: Version | None = None
    staleness_exempt: Annotated[
        bool,
        Declared(
            description="trained on however old it is: a demonstration, or of a replay buffer; "
            "where --max-staleness is set every other sample needs a policy_version"
        ),
    ] = False

    def check_group(self) -> None:
        """Raise FieldRefused for a size without a group."""
        size = self.group_size
        if self.group_id is None and size is not None and size != 1:
            raise FieldRefused(
                f"group_size is {size}, and no group_id says which samples belong together"
            )

    def told(
        self, reading: Reading, span: Iterable[memoryview], tokens: int, rows: tuple[int, ...]
    ) -> dict[str, Any]:
        """What the sample has of it: one without an id is given one, another one a checksum."""
        size = SIZE_NOT_TOLD if reading.group_size is None else reading.group_size
        if self.group_size is not None:
            size = SIZE_AT_CLOSE if self.group_size == AT_CLOSE else int(self.group_size)
        checksum = None
        if self.sample_id is not None:
            facts = (tokens, rows, self.group_id, self.policy_version)
            checksum = content_checksum(span, *facts)
        return {
            "checksum": checksum,
            "sample_id": self.sample_id or f"http/{uuid.uuid4().hex}",
            "group_id": self.group_id,
            "group_size": size if self.group_id is not None else 1,
            "policy_version": self.policy_version,
            "staleness_exempt": self.staleness_exempt,
        }


#: The member that tells a sample by reference from one with its tensors.
REFERENCE = "reference"
#: Of one field: its name, type and shape have less, and blanks are allowed. What some requests said
#: is kept.
MAX_LETTERS = 3 * MAX_NAME


class Place(BaseModel):
    """Where a sample's span lies, as the protocol's ObjectHeader and place say it."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
    store: StoreAddress
    """the store's address, one of --payload-stores"""
    key: Key
    """of the object there: used once, and put before it is pushed"""
    nbytes: Total
    """of the whole object"""
    offset: Count = 0
    """the byte of the object that the sample's span begins at"""


class ReferenceRequest(Metadata):
    """One sample that lies in a payload store; its object is the dispatcher's to release."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    reference: Place
    fields: Annotated[
        list[Annotated[str, Declared(max_length=MAX_LETTERS)]],
        Declared(min_length=1, max_length=MAX_FIELDS),
    ]
    """what lies in its span, in this order, which is that of the names: each as --fields has it,
    name:dtype, name:dtype:per-sample, name:dtype:ragged or name:str"""
    tokens: Tokens
    """that it has"""
    loss_tokens: Count
    """of these, how many the loss counts; never the first, which is no target"""
    rows: Annotated[dict[Name, Rows], Declared(max_length=MAX_FIELDS, default_factory=dict)]
    """how many it has of each ragged field; of a text, its bytes in UTF-8"""


def referenced(request: ReferenceRequest, reading: Reading, taken: set[tuple[str, str]]) -> Sample:
    """The sample. taken: objects that others of the request lie in, by store and key.

    Raises FieldRefused.
    """
    request.check_group()
    schema = _schema(request.fields, reading)
    if request.rows.keys() != {*schema.ragged}:
        raise FieldRefused(
            f"rows has {_listed(request.rows)}, and the ragged fields are {_listed(schema.ragged)}"
        )
    rows = tuple(request.rows[name] for name in schema.ragged)
    return Sample(
        tokens=request.tokens,
        loss_tokens=request.loss_tokens,
        schema=schema,
        payload=_reference(request.reference, schema.nbytes(request.tokens, rows), taken),
        rows=rows,
        **request.told(reading, [], request.tokens, rows),
    )


def _reference(place: Place, nbytes: int, taken: set[tuple[str, str]]) -> Reference:
    if place.offset + nbytes > place.nbytes:
        raise FieldRefused(
            f"reference: with these fields and tokens the sample has {nbytes} bytes, and begins at "
            f"byte {place.offset} of the object {place.key}, which has {place.nbytes}"
        )
    if (place.store, place.key) in taken:
        raise FieldRefused(
            f"reference.key: another sample of the request lies in {place.key} too; over HTTP each "
            "has an object of its own (RolloutProducer.push_references takes several in one)"
        )
    taken.add((place.store, place.key))
    return Reference(StoredObject(place.store, place.key, place.nbytes), place.offset, nbytes)


def _schema(fields: list[str], reading: Reading) -> Schema:
    found = _parsed(tuple(fields))
    known = reading.schema  # one object is soon compared
    return known if known is not None and found == known else found


@lru_cache(maxsize=64)
def _parsed(fields: tuple[str, ...]) -> Schema:
    """The order is said, and not only meant: a span in another would be read as something else."""
    try:
        found = schema_of(fields)
    except ValueError as error:
        raise FieldRefused(f"fields: {error}") from None
    assert found is not None, "there is one at least"
    given = [field.split(":")[0].strip() for field in fields]
    if given != [*found.names]:
        raise FieldRefused(
            "fields: they are given, and lie in the span, in the order of their names: "
            f"{', '.join(found.names)}"
        )
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
