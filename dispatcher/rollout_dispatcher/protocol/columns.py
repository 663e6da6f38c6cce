"""What messages that carry samples have in common: their fields, and columns of facts about them.

Columns (`tokens`, `sample_ids`, ...) have one entry a sample.
"""

from functools import cached_property, lru_cache
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic import Field as Declared

from rollout_dispatcher.sample import DType, Field, Schema

#: Fields of a sample; far above what any trainer reads.
MAX_FIELDS = 64

Name = Annotated[str, Declared(min_length=1, max_length=128)]
Count = Annotated[int, Declared(ge=0, lt=2**53)]
Tokens = Annotated[int, Declared(ge=0, lt=2**31)]
Version = Annotated[int, Declared(ge=0, lt=2**53)]
Extent = Annotated[int, Declared(ge=1, lt=2**31)]


class Message(BaseModel):
    """Base: immutable, no unknown keys, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    type_code: ClassVar[int]


@lru_cache(maxsize=64)
def _schema(fields: tuple[Field, ...]) -> Schema:
    """One object a schema, so that comparing the schemas of samples costs next to nothing."""
    return Schema(fields)


class FieldHeader(Message):
    """`sample.Field` on the wire."""

    type_code = 0
    name: Name
    dtype: Annotated[DType, Declared(strict=False)]
    per_token: bool = True
    shape: Annotated[list[Extent], Declared(max_length=8)] = []


class HasFields(Message):
    """The fields that samples share."""

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
                Field(item.name, item.dtype, item.per_token, tuple(item.shape))
                for item in self.fields
            )
        )


class HasColumns(Message):
    """Columns over samples."""

    columns: ClassVar[tuple[str, ...]] = (
        "loss_tokens",
        "sample_ids",
        "group_ids",
        "policy_versions",
    )
    tokens: list[Tokens]
    loss_tokens: list[Count]
    sample_ids: list[Name]
    group_ids: list[Name | None] | None = None
    policy_versions: list[Version | None] | None = None

    @model_validator(mode="after")
    def _columns_agree(self) -> Self:
        size = len(self.tokens)
        for name in self.columns:
            column = getattr(self, name)
            if column is not None and len(column) != size:
                raise ValueError(f"{name} has {len(column)} entries for {size} samples")
        return self


@lru_cache(maxsize=64)
def field_headers(schema: Schema) -> list[FieldHeader]:
    """A schema as it goes over the wire; the same list for all who ask, so do not change it."""
    return [
        FieldHeader(
            name=item.name, dtype=item.dtype, per_token=item.per_token, shape=list(item.shape)
        )
        for item in schema.fields
    ]
