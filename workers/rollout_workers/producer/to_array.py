"""What a rollout worker holds (a tensor, an array, a list) as an array whose memory can travel.

torch tensors are recognised without importing torch. Memory is copied only where it has to be: out
of lists, off a GPU, into C order and little endian, into another type. Text becomes its UTF-8.

A value never decides on a type. Arrays and tensors keep theirs; Python's numbers, those in lists
too, have that of their field's name (`values.py:type_of_numbers`). Where the schema of the run's
samples is known, what stays the same number is made of its type:

    from                      into
    integers, booleans        any type that holds each value exactly (1 into float32, 0/1 into bool)
    0.0 and 1.0               bool
    Python's floats           any float, rounded, unless that makes a number infinite
    float64                   float32, in the same way
    text                      text, and nothing else into it
    other floats              floats that hold each value exactly
    floats                    integers: never, whatever their values

What does not fit is refused by the name of the field, the value and its index.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.sample import DType
from rollout_dispatcher.values import NUMPY_DTYPES, Place, first_changed, place_of, type_of_numbers

#: A tensor, an array, nested lists of numbers, or a str.
ArrayLike = Any
Array = NDArray[Any]

#: Arrays of these types travel as they are.
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
        array = cast(name, array, found, dtype, why, rounds=True)
    return array, dtype


def to_typed(name: str, value: ArrayLike, dtype: DType, set_by: str) -> Array:
    """The field as a C-contiguous little-endian array of this type.

    set_by: in words, who has decided on it. Raises SampleRefused for what it does not hold.
    """
    array, found = _found(name, value)
    return recast(name, array, found, dtype, set_by, rounds=isinstance(value, _PLAIN))


def recast(
    name: str, array: Array, found: DType, dtype: DType, set_by: str, *, rounds: bool = False
) -> Array:
    """An array of one type as one of that which the run's samples have; raises SampleRefused.

    rounds: whether its floats may be rounded to any others.
    """
    if found is dtype:
        return array
    if DType.STR in (found, dtype):
        raise SampleRefused(
            "bad-dtype", f"{name} is {found}; the run's samples have it as {dtype} ({set_by})"
        )
    rounds |= (found, dtype) == (DType.FLOAT64, DType.FLOAT32)
    why = f"the run's samples have {name} as {dtype} ({set_by})"
    return cast(name, array, found, dtype, why, rounds=rounds)


def _found(name: str, value: ArrayLike) -> tuple[Array, DType]:
    """The same, of the type that it has: Python's floats are float64, its integers int64."""
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
    # order="C", not ascontiguousarray: that one makes a dimension out of none.
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


def cast(name: str, array: Array, found: DType, dtype: DType, why: str, *, rounds: bool) -> Array:
    """An array of one type on the wire as one of another; raises SampleRefused, and says why.

    rounds: whether floats may be rounded to others.
    """
    array = _from_bfloat16(array) if found is DType.BFLOAT16 else array
    wanted = NUMPY_DTYPES.get(dtype, NUMPY_DTYPES[DType.FLOAT32])
    if array.size and array.dtype.kind == "f" and wanted.kind in "iu":
        raise _misfit(name, array, (0,) * array.ndim, f"{why}; floats never become integers")
    with np.errstate(all="ignore"):
        changed = array.astype(wanted.newbyteorder("<"))
    if dtype is DType.BFLOAT16:
        changed = _as_bfloat16_holds(changed, rounds=rounds)
    rounds = rounds and array.dtype.kind == "f"
    if (at := first_changed(array, changed, rounds=rounds)) is not None:
        raise _misfit(name, array, at, why)
    return _to_bfloat16(changed) if dtype is DType.BFLOAT16 else changed


def _misfit(name: str, array: Array, at: Place, why: str) -> SampleRefused:
    text = f"{name}{place_of(at)} is {array[at]!s}, which does not fit: {why}"
    return SampleRefused("bad-dtype", text)


def _from_bfloat16(array: Array) -> Array:
    """float32 of what travels as int16."""
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _as_bfloat16_holds(array: Array, *, rounds: bool) -> Array:
    """float32 of which bfloat16 holds each value: cut off, or rounded to the nearest, then even."""
    bits = array.view(np.uint32)
    if rounds:
        bits = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    return np.asarray(bits & np.uint32(0xFFFF0000)).view(np.float32)


def _to_bfloat16(array: Array) -> Array:
    """The upper halves of float32, as they travel."""
    return np.asarray(array.view(np.uint32) >> 16, np.uint16).view(np.int16)
