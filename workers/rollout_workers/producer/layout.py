"""The layout of a worker's samples: derived from the first, recognised in the others.

A field is *per-sample* if it has no dimensions or is named in `per_sample`, and *ragged* if it is
named in `ragged`, or text: its first dimension, its rows, differs by sample. Every other field is
*per-token*: its first dimension must be the number of tokens, which is the length of `input_ids`.
Fields are ordered by name, so the order of a dict never matters.

The samples of a rollout worker differ only in lengths and values, so each is compared with the
layout of the one before: several times faster than to derive it again.

It also converts a field's value (a tensor, an array, a list) to an array whose memory can be sent.

torch tensors are recognised without importing torch. Memory is copied only if it must be: out of
lists, off a GPU, into C order and little endian, into another type. Text becomes UTF-8.

A type never depends on a value. Arrays and tensors keep theirs; the type of Python's numbers, also
in lists, follows from the field's name (`values.py:type_of_numbers`). Once the run's schema is
known, a value is converted to the schema's type if that keeps the number:

    from                      into
    integers, booleans        any type that holds each value exactly (1 into float32, 0/1 into bool)
    0.0 and 1.0               bool
    Python's floats           any float, rounded, unless that makes a number infinite
    float64                   float32, in the same way
    text, bfloat16            the same type, and nothing else into it
    other floats              floats that hold each value exactly
    floats                    integers: never, whatever their values

The refusal of a value names the field, the value and its index.
"""

import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.errors import ConfigError, SampleRefused
from rollout_dispatcher.sample import METADATA, DType, Field, Schema, is_reserved
from rollout_dispatcher.values import (
    NUMPY_DTYPES,
    Place,
    first_changed,
    negative_id,
    place_of,
    type_of_numbers,
)

#: A tensor, an array, nested lists of numbers, or a str.
ArrayLike = Any
Array = NDArray[Any]

#: Arrays of these types are sent unchanged.
_AS_IS = {dtype.newbyteorder("<"): item for item, dtype in NUMPY_DTYPES.items()}
_NAMES = tuple(map(str, DType))
_NUMBERS = frozenset(_NAMES) - {DType.STR}

#: Python's own numbers, and lists of numbers; numpy.float64 is a float to Python as well.
_PLAIN = (float, int, list, tuple, range)


def to_array(name: str, value: ArrayLike) -> tuple[Array, DType]:
    """The field `name` as a C-contiguous little-endian array, and its type on the wire.

    A bfloat16 tensor becomes an array of int16. Raises SampleRefused that names the field.
    """
    array, found = _found(name, value)
    if not isinstance(value, _PLAIN) or found is DType.BOOL:
        return array, found
    dtype = type_of_numbers(name)
    if found is not dtype:
        why = f"Python's numbers are {dtype} in {name}; arrays and tensors keep their type"
        array = cast(name, array, dtype, why, rounds=True)
    return array, dtype


def to_typed(name: str, value: ArrayLike, dtype: DType, set_by: str) -> Array:
    """The field as a C-contiguous little-endian array of this type.

    set_by: origin of the type, in words. Raises SampleRefused for values that it cannot hold.
    """
    array, found = _found(name, value)
    if found is dtype:
        return array
    if {DType.STR, DType.BFLOAT16} & {found, dtype}:
        raise SampleRefused(
            "bad-dtype", f"{name} is {found}; the run's samples have it as {dtype} ({set_by})"
        )
    rounds = isinstance(value, _PLAIN) or (found, dtype) == (DType.FLOAT64, DType.FLOAT32)
    why = f"the run's samples have {name} as {dtype} ({set_by})"
    return cast(name, array, dtype, why, rounds=rounds)


def _found(name: str, value: ArrayLike) -> tuple[Array, DType]:
    """The array in its own type: Python's floats are float64, its integers int64."""
    if type(value) is np.ndarray and value.flags.c_contiguous:
        known = _AS_IS.get(value.dtype)
        if known is not None:
            return value, known
    if isinstance(value, str):
        return _from_text(name, value), DType.STR
    if type(value).__module__.partition(".")[0] == "torch":
        return _from_torch(name, value)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SampleRefused("bad-field", f"{name} is no array: {error}") from error
    if array.dtype.kind == "U":
        raise SampleRefused("bad-dtype", f"{name} holds strings; text is one str a sample")
    if array.dtype.name not in _NUMBERS:
        raise SampleRefused(
            "bad-dtype", f"{name} is {array.dtype.name}; accepted are {', '.join(_NAMES)}"
        )
    # Not ascontiguousarray, which adds a dimension to a scalar.
    array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    return array, DType(array.dtype.name)


def _from_text(name: str, value: str) -> Array:
    try:
        return np.frombuffer(value.encode(), np.uint8)
    except UnicodeEncodeError as error:
        raise SampleRefused("bad-field", f"{name} is no text that UTF-8 has: {error}") from None


def _from_torch(name: str, tensor: Any) -> tuple[Array, DType]:
    dtype = _torch_dtype(name, tensor.dtype)
    tensor = tensor.contiguous()
    if dtype is DType.BFLOAT16:
        import torch  # noqa: PLC0415  the caller has it, or there would be no tensor

        tensor = tensor.view(torch.int16)
    return tensor.numpy(force=True), dtype  # detached and on the CPU


@lru_cache(maxsize=256)
def _torch_dtype(name: str, dtype: object) -> DType:
    """The type on the wire of a torch.dtype; raises SampleRefused that names the field."""
    word = str(dtype).removeprefix("torch.")
    if word not in _NUMBERS:
        raise SampleRefused("bad-dtype", f"{name} is {word}; accepted are {', '.join(_NAMES)}")
    return DType(word)


def cast(name: str, array: Array, dtype: DType, why: str, *, rounds: bool) -> Array:
    """Convert an array between types on the wire; raises SampleRefused with `why`.

    rounds: whether floats may be rounded.
    """
    wanted = NUMPY_DTYPES[dtype]
    if array.size and array.dtype.kind == "f" and wanted.kind in "iu":
        raise _misfit(name, array, (0,) * array.ndim, f"{why}; floats never become integers")
    with np.errstate(all="ignore"):
        changed = array.astype(wanted.newbyteorder("<"))
    rounds = rounds and array.dtype.kind == "f"
    if (at := first_changed(array, changed, rounds=rounds)) is not None:
        raise _misfit(name, array, at, why)
    return changed


def _misfit(name: str, array: Array, at: Place, why: str) -> SampleRefused:
    text = f"{name}{place_of(at)} is {array[at]!s}, which does not fit: {why}"
    return SampleRefused("bad-dtype", text)


#: Exponent bits of a bfloat16 held as int16; all are set in NaN and the infinities.
_EXPONENT = np.int16(0x7F80)
#: Numbers up to which BLAS computes a dot product in one thread.
DOT_MOST = 8192
#: First dimension in the shape of a ragged field.
ANY = (-1,)


class Named(NamedTuple):
    """Names of the fields that are not per-token."""

    per_sample: frozenset[str]
    ragged: frozenset[str]

    @classmethod
    def of(cls, per_sample: Collection[str], ragged: Collection[str]) -> Self:
        """Raises ConfigError for a field that is named as both, or may be neither."""
        found = cls(frozenset(per_sample), frozenset(ragged))
        if both := sorted(found.per_sample & found.ragged):
            raise ConfigError(f"{both[0]} is named in per_sample and in ragged; it can be one")
        if "input_ids" in found.per_sample | found.ragged:
            raise ConfigError("input_ids is per token: it says how many tokens a sample has")
        return found

    def also(self, schema: Schema) -> "Named":
        """These and the schema's fields that are not per-token."""
        ragged = {item.name for item in schema.fields if item.ragged}
        others = {item.name for item in schema.fields if not item.per_token}
        return Named(self.per_sample | others, self.ragged | ragged)


class Trait(NamedTuple):
    """Type and shape to compare a field's value with.

    numpy_dtype: None if numpy has no such type. shape: of a token's value, or a sample's; for a
    ragged field (-1, ...), which is no array's shape.
    """

    name: str
    dtype: DType
    numpy_dtype: np.dtype[Any] | None
    per_token: bool
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """The schema of checked fields, in a form that recognises samples like them fast.

    ids, mask: index of `input_ids` and `loss_mask` in `traits`, None without a mask. ragged:
    indices of ragged fields. floats: of fields with one float per token or sample. set_by: origin
    of the run's schema, in words; None if the layout comes from earlier samples.
    """

    schema: Schema
    traits: tuple[Trait, ...]
    ids: int
    mask: int | None
    ragged: tuple[int, ...] = ()
    floats: tuple[int, ...] = ()
    set_by: str | None = None

    def arrays(self, fields: Mapping[str, ArrayLike]) -> list[Array] | None:
        """The arrays of these fields in span order; None if their layout differs.

        Raises SampleRefused for a value that is no array of numbers, or does not fit the schema.
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
                    value = None if per_token else _rows_of(value, shape)
                    if value is None:
                        return None
                arrays.append(value)
        except (KeyError, TypeError):  # a field is missing, or input_ids has no length
            return None
        return arrays if rows[0] else None

    def rows(self, arrays: list[Array]) -> tuple[int, ...]:
        """The rows of each ragged field."""
        return tuple([len(arrays[at]) for at in self.ragged])

    def check_ids(self, ids: Array) -> None:
        """Raise SampleRefused for a negative token id."""
        if ids.dtype.kind == "i" and ids.item(ids.argmin()) < 0:  # half the time of min()
            at = int(np.argmax(ids < 0))
            raise SampleRefused("bad-field", negative_id(f"input_ids[{at}]", int(ids[at])))

    def check_finite(self, arrays: list[Array]) -> None:
        """Raise SampleRefused for NaN or infinity in a field of one number per token or sample.

        The caller silences numpy's overflows (`np.errstate`), once for all samples of a push.
        """
        for at in self.floats:
            array = arrays[at]
            if _is_finite(array):
                continue
            place = place_of(np.unravel_index(int(np.argmin(_finite(array))), array.shape))
            raise SampleRefused(
                "bad-field",
                f"{self.traits[at].name}{place} is NaN or infinite, and so would be the loss "
                "of the whole step: mend what computes it, or make the producer with "
                "allow_non_finite=True",
            )

    def loss_tokens(self, arrays: list[Array], tokens: int) -> tuple[int, int]:
        """Number of tokens that the loss counts, and of marked ones that it leaves out (0 or 1).

        The first token is never a target, as nothing in the sample predicts it. Raises
        SampleRefused for a mask with other values than zeros and ones.
        """
        if self.mask is None:
            return tokens - 1, 0
        mask, dtype = arrays[self.mask], self.traits[self.mask].dtype
        if dtype is not DType.BOOL:
            one = 0x3F80 if dtype is DType.BFLOAT16 else 1
            if not np.isin(mask, (0, one)).all():
                raise _bad_mask()
        left_out = int(bool(mask[0]))
        return int(np.count_nonzero(mask)) - left_out, left_out


def _is_finite(array: Array) -> bool:
    """Whether all numbers of a field, [tokens] or one, are finite.

    A finite dot product with itself proves it, in a quarter of the time of `isfinite`; the product
    may overflow. For more than `DOT_MOST` numbers BLAS would start threads.
    """
    if array.dtype.char in "fd" and array.size <= DOT_MOST and math.isfinite(array.dot(array)):
        return True
    return bool(_finite(array).all())


def _finite(array: Array) -> NDArray[np.bool_]:
    """Whether each number is finite."""
    if array.dtype.kind == "f":
        return np.asarray(np.isfinite(array))
    return np.asarray((array & _EXPONENT) != _EXPONENT)


def layout_of(schema: Schema, set_by: str) -> Layout:
    """The layout of a run's samples. Raises SampleRefused for fields that no sample can have."""
    return _layout(schema.fields)._replace(set_by=set_by)


def lay_out(
    fields: Mapping[str, ArrayLike], named: Named, known: Layout | None = None
) -> tuple[Layout, list[Array]]:
    """The layout of these fields, and their arrays in span order.

    known: the run's layout, for fields of the same names.

    Raises SampleRefused, which names the field and its fault.
    """
    if "input_ids" not in fields:
        raise SampleRefused("no-input-ids", "the sample has no field input_ids")
    decided, set_by = dict[str, DType](), ""
    if known is not None:
        named = named.also(known.schema)
        decided = {item.name: item.dtype for item in known.schema.fields}
        set_by = known.set_by or ""
    found = dict[str, tuple[Array, DType]]()
    for name in sorted(fields):
        dtype = decided.get(name)
        found[name] = (
            to_array(name, fields[name])
            if dtype is None
            else (to_typed(name, fields[name], dtype, set_by), dtype)
        )
    tokens = _token_count(*found["input_ids"])
    items = tuple(_field(name, *item, tokens, named) for name, item in found.items())
    return _layout(items), [array for array, _ in found.values()]


def _field(name: str, array: Array, dtype: DType, tokens: int, named: Named) -> Field:
    """The field of an array in a sample of `tokens` tokens; raises SampleRefused."""
    if name in named.ragged or dtype is DType.STR:
        if not array.ndim:
            raise SampleRefused("bad-field", f"{name} is ragged, and one number has no rows")
        return Field(name, dtype, per_token=False, shape=array.shape[1:], ragged=True)
    if name in named.per_sample or not array.ndim:
        return Field(name, dtype, per_token=False, shape=array.shape)
    if array.shape[0] != tokens:
        raise _not_per_token(name, array.shape[0], tokens)
    return Field(name, dtype, shape=array.shape[1:])


@lru_cache(maxsize=64)
def _layout(fields: tuple[Field, ...]) -> Layout:
    """The layout of these fields; raises SampleRefused."""
    for item in fields:
        name, shape = item.name, item.shape
        if is_reserved(name) or not 1 <= len(name) <= 128:
            raise SampleRefused("bad-field", f"a field may not be called {name!r}")
        if name in METADATA:
            raise SampleRefused(
                "bad-field",
                f"{name} is no field of a sample but an argument: push(..., {name}=) or "
                f"RolloutSample(..., {name}=)",
            )
        if len(shape) > 8 or 0 in shape:
            raise SampleRefused("bad-field", f"{name} has values of the shape {list(shape)}")
        if name == "loss_mask" and not (item.per_token and shape == ()):
            raise _bad_mask()
    schema = Schema(fields)
    traits = tuple(map(_trait, fields))
    mask = schema.names.index("loss_mask") if "loss_mask" in schema.names else None
    ragged = tuple(at for at, item in enumerate(fields) if item.ragged)
    floats = tuple(
        at
        for at, item in enumerate(fields)
        if "float" in item.dtype and item.shape == () and not item.ragged
    )
    return Layout(schema, traits, schema.names.index("input_ids"), mask, ragged, floats)


def _trait(item: Field) -> Trait:
    shape = ANY + item.shape if item.ragged else item.shape
    return Trait(item.name, item.dtype, NUMPY_DTYPES.get(item.dtype), item.per_token, shape)


def _rows_of(array: Array, shape: tuple[int, ...]) -> Array | None:
    """The rows of a ragged field whose trait has this shape; None if they do not fit.

    An empty list means no rows of any shape.
    """
    if shape[:1] != ANY:
        return None
    if array.shape == (0,):
        return array.reshape(0, *shape[1:])
    return array if array.ndim == len(shape) and array.shape[1:] == shape[1:] else None


def _token_count(array: Array, dtype: DType) -> int:
    if not array.size:
        raise SampleRefused("empty", "the sample has no tokens: input_ids is empty")
    if array.ndim != 1 or array.dtype.kind not in "iu" or dtype in (DType.BFLOAT16, DType.STR):
        raise SampleRefused(
            "bad-field", f"input_ids must be integers [tokens], not {dtype}{list(array.shape)}"
        )
    return int(array.size)


def _not_per_token(name: str, rows: int, tokens: int) -> SampleRefused:
    return SampleRefused(
        "bad-field",
        f"{name} has {rows} rows for {tokens} tokens; a field with one value a sample is named in "
        f"per_sample=({name!r},) when the producer is made, one whose rows differ by sample in "
        f"ragged=({name!r},)",
    )


def _bad_mask() -> SampleRefused:
    return SampleRefused(
        "bad-field",
        "loss_mask must be zeros and ones, one a token; weights of other values "
        "are a field of their own, which the trainer multiplies its loss by",
    )
