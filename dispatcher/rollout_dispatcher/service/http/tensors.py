"""JSON numbers as tensors: which element type a field has, and whether its values fit it.

The type of a field hangs on its name and on what is known of the run's samples, and never on its
values, as of `[1, 0]` and `[0.5, 1]` only one looks like integers to most writers of JSON:

    said with it                            {"dtype": "int64", "data": [...]}
    booleans                                bool
    the run's schema is known               its type
    input_ids, labels, *_ids                int64
    *_mask                                  bool
    others                                  float32

What is said to be of another type than the run's samples have is made theirs. Only float32 and
narrower floats round; whatever else a type does not hold exactly is refused.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.sample import DType, Schema
from rollout_dispatcher.values import NUMPY_DTYPES, first_changed, place_of

Array = NDArray[Any]


class TypedTensor(BaseModel):
    """A tensor whose element type is given."""

    model_config = ConfigDict(extra="forbid")
    dtype: DType
    data: Any


@dataclass(frozen=True, slots=True)
class Reading:
    """How numbers are read.

    group_size: of groups whose samples do not say. schema: of the run's samples, None while it is
    not known. allow_non_finite: whether NaN and infinities are taken.
    """

    group_size: int | None = None
    schema: Schema | None = None
    allow_non_finite: bool = False


def default_dtype(name: str) -> DType:
    """What a field's numbers are, if nobody has said so."""
    if name in ("input_ids", "labels") or name.endswith("_ids"):
        return DType.INT64
    return DType.BOOL if name.endswith("_mask") else DType.FLOAT32


def read_tensor(name: str, value: Any, reading: Reading) -> Array:
    """The tensor in its element type. Raises ProtocolError that names the field and the value."""
    typed = TypedTensor.model_validate(value) if isinstance(value, dict) else None
    if typed is not None and typed.dtype is DType.BFLOAT16:
        raise ProtocolError(f"fields.{name}: bfloat16 has no JSON form; send float32")
    try:
        array = np.asarray(value if typed is None else typed.data)
    except ValueError as error:
        raise ProtocolError(f"fields.{name} is no tensor: {error}") from None
    if array.dtype.kind not in "biuf":
        raise ProtocolError(f"fields.{name} is no tensor of numbers or booleans")
    if not reading.allow_non_finite and array.dtype.kind == "f":
        _check_finite(name, array)
    if typed is not None:
        array = _cast(name, array, typed.dtype, "as it says itself")
    return _of_the_run(name, array, typed, reading.schema)


def _of_the_run(name: str, array: Array, typed: TypedTensor | None, schema: Schema | None) -> Array:
    """In the type that the run's samples have, or in its own."""
    known = None if schema is None else schema.by_name.get(name)
    if known is not None and known.dtype is not DType.BFLOAT16:
        return _cast(name, array, known.dtype, "as the run's samples have it")
    if typed is not None or array.dtype == np.bool_:
        return array
    return _cast(name, array, default_dtype(name), "as numbers of that name are")


def _check_finite(name: str, array: Array) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        at = np.unravel_index(int(np.argmin(finite)), array.shape)
        raise ProtocolError(
            f"fields.{name}{place_of(at)} is {array[at]}; NaN and infinities are taken with "
            "--allow-non-finite"
        )


def _cast(name: str, array: Array, dtype: DType, why: str) -> Array:
    """The array in this type. Raises ProtocolError for a value that it cannot hold."""
    numpy_dtype = NUMPY_DTYPES[dtype]
    if array.dtype == numpy_dtype:
        return array
    with np.errstate(all="ignore"):
        cast = array.astype(numpy_dtype)
    # JSON has one kind of number, so rounding to the floats that are asked for is no loss to it.
    if (at := first_changed(array, cast, rounds=array.dtype.kind == "f")) is not None:
        raise ProtocolError(
            f"fields.{name}{place_of(at)} is {array[at]}, which {dtype} ({why}) does not hold; "
            f'{{"dtype": ..., "data": ...}} gives it another type, --fields one to all samples'
        )
    return cast
