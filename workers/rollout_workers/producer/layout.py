"""What samples of one kind have in common: worked out for the first, recognised in the others.

A field is *per-sample* if it has no dimensions or is named in `per_sample`; every other field is
*per-token*: its first dimension must be the number of tokens, which is the length of `input_ids`.
Fields are ordered by name, so that the order of a dict never matters.

The samples of a rollout worker differ in their lengths and values only, so each is held against the
layout of the one before, which is several times faster than to check and describe it afresh.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import METADATA, RESERVED, DType, Field, Schema
from rollout_dispatcher.values import NUMPY_DTYPES
from rollout_workers.producer.to_array import Array, ArrayLike, recast, to_array, to_typed


class Trait(NamedTuple):
    """What a field's value is compared with; numpy_dtype: None where numpy has no such type."""

    name: str
    dtype: DType
    numpy_dtype: np.dtype[Any] | None
    per_token: bool
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """The schema of checked fields, and what it takes to recognise others like them.

    ids, mask: which of the traits are `input_ids` and `loss_mask`, None without a mask.
    set_by: in words, who has decided that the run's samples are laid out like this; None if it is
    only those before.
    """

    schema: Schema
    traits: tuple[Trait, ...]
    ids: int
    mask: int | None
    set_by: str | None = None

    def arrays(self, fields: Mapping[str, ArrayLike]) -> list[Array] | None:
        """The arrays of these fields, in span order; None if they are not laid out like this.

        Raises SampleRefused for a value that is no array of numbers, or does not fit the run's.
        """
        arrays: list[Array] = []
        if len(fields) != len(self.traits):
            return None
        try:
            rows = (len(fields["input_ids"]),)
            for name, dtype, numpy_dtype, per_token, shape in self.traits:
                value = fields[name]
                if (
                    type(value) is not np.ndarray
                    or value.dtype is not numpy_dtype
                    or not value.flags.c_contiguous
                ):
                    if self.set_by is not None:
                        value = to_typed(name, value, dtype, self.set_by)
                    else:
                        value, found = to_array(name, value)
                        if found is not dtype:
                            return None
                if value.shape != (rows + shape if per_token else shape):
                    return None
                arrays.append(value)
        except (KeyError, TypeError):  # a field is missing, or input_ids has no length
            return None
        return arrays if rows[0] else None

    def refit(self, schema: Schema, arrays: Sequence[Array], tokens: int) -> list[Array] | None:
        """Arrays of a sample of another schema as this one has them; None if they do not fit."""
        if schema.names != self.schema.names:
            return None
        found = []
        for item, array, trait in zip(schema.fields, arrays, self.traits, strict=True):
            if array.shape != ((tokens, *trait.shape) if trait.per_token else trait.shape):
                return None
            try:
                found.append(recast(item.name, array, item.dtype, trait.dtype, self.set_by or ""))
            except SampleRefused:
                return None
        return found

    def loss_tokens(self, arrays: list[Array], tokens: int) -> int:
        """How many tokens the loss counts. Raises SampleRefused for a mask of other values.

        Without a mask: all but the first, which nothing in the sample predicts.
        """
        if self.mask is None:
            return tokens - 1
        mask, dtype = arrays[self.mask], self.traits[self.mask].dtype
        if dtype is not DType.BOOL:
            one = 0x3F80 if dtype is DType.BFLOAT16 else 1
            if not np.isin(mask, (0, one)).all():
                raise _bad_mask()
        return int(np.count_nonzero(mask))


def layout_of(schema: Schema, set_by: str) -> Layout:
    """The layout of a run's samples. Raises SampleRefused for what no sample can have."""
    traits = tuple((item.name, item.dtype, item.per_token, item.shape) for item in schema.fields)
    return _layout(traits)._replace(set_by=set_by)


def lay_out(
    fields: Mapping[str, ArrayLike], per_sample: Collection[str], known: Layout | None = None
) -> tuple[Layout, list[Array]]:
    """The layout of these fields, and their arrays in span order.

    known: that of the run's samples, as far as they have fields of the same names.

    Raises SampleRefused that names the field and what is wrong with it.
    """
    if "input_ids" not in fields:
        raise SampleRefused("no-input-ids", "the sample has no field input_ids")
    decided, set_by = dict[str, DType](), ""
    if known is not None:
        per_sample = {*per_sample, *(trait.name for trait in known.traits if not trait.per_token)}
        decided, set_by = {trait.name: trait.dtype for trait in known.traits}, known.set_by or ""
    found = dict[str, tuple[Array, DType]]()
    for name in sorted(fields):
        dtype = decided.get(name)
        found[name] = (
            to_array(name, fields[name])
            if dtype is None
            else (to_typed(name, fields[name], dtype, set_by), dtype)
        )
    tokens = _token_count(*found["input_ids"])
    traits = []
    for name, (array, dtype) in found.items():
        per_token = array.ndim > 0 and name not in per_sample
        if per_token and array.shape[0] != tokens:
            raise _not_per_token(name, array.shape[0], tokens)
        traits.append((name, dtype, per_token, array.shape[1:] if per_token else array.shape))
    return _layout(tuple(traits)), [array for array, _ in found.values()]


@lru_cache(maxsize=64)
def _layout(traits: tuple[tuple[str, DType, bool, tuple[int, ...]], ...]) -> Layout:
    """The layout of fields with these names, types and shapes; raises SampleRefused."""
    for name, _, per_token, shape in traits:
        if name in RESERVED or not 1 <= len(name) <= 128:
            raise SampleRefused("bad-field", f"a field may not be called {name!r}")
        if name in METADATA:
            raise SampleRefused(
                "bad-field",
                f"{name} is no field of a sample but told beside them: push(..., {name}=) or "
                f"RolloutSample(..., {name}=)",
            )
        if len(shape) > 8 or 0 in shape:
            raise SampleRefused("bad-field", f"{name} has values of the shape {list(shape)}")
        if name == "loss_mask" and not (per_token and shape == ()):
            raise _bad_mask()
    schema = Schema(tuple(Field(*trait) for trait in traits))
    expected = tuple(
        Trait(name, dtype, NUMPY_DTYPES.get(dtype), per_token, shape)
        for name, dtype, per_token, shape in traits
    )
    mask = schema.names.index("loss_mask") if "loss_mask" in schema.names else None
    return Layout(schema, expected, schema.names.index("input_ids"), mask)


def _token_count(array: Array, dtype: DType) -> int:
    if not array.size:
        raise SampleRefused("empty", "the sample has no tokens: input_ids is empty")
    if array.ndim != 1 or array.dtype.kind not in "iu" or dtype is DType.BFLOAT16:
        raise SampleRefused(
            "bad-field", f"input_ids must be integers [tokens], not {dtype}{list(array.shape)}"
        )
    return int(array.size)


def _not_per_token(name: str, rows: int, tokens: int) -> SampleRefused:
    return SampleRefused(
        "bad-field",
        f"{name} has {rows} rows for {tokens} tokens; a field with one value a sample is named in "
        f"per_sample=({name!r},) when the producer is made",
    )


def _bad_mask() -> SampleRefused:
    return SampleRefused(
        "bad-field",
        "loss_mask must be zeros and ones, one a token; weights of other values "
        "are a field of their own, which losses= of MicroBatchStream names",
    )
