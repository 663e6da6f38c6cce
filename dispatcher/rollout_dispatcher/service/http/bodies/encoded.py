"""Tensors in base64: `{"dtype": "float32", "shape": [3, 4], "base64": "..."}`.

What is written is their memory: little endian, the last dimension first, no text of numbers to
read. The size that type and shape make is compared with that of the text before any of it is
decoded, a piece at a time.
"""

from binascii import Error as NoBase64
from binascii import a2b_base64
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from rollout_dispatcher.sample import DType
from rollout_dispatcher.service.http.bodies.json_text import Base64Text
from rollout_dispatcher.service.http.bodies.pieces import PIECE, Work
from rollout_dispatcher.service.http.bodies.tensors import (
    ELEMENTS,
    ElementType,
    FieldRefused,
    Tensor,
)

#: What a piece of text decodes to is a multiple of every element's size.
_FOUR, _THREE = 4, 3
assert PIECE // _FOUR * _THREE % 8 == 0 == PIECE % _FOUR
#: The exponent of a bfloat16; NaN and the infinities have all of it.
_EXPONENT: Final = 0x7F80


class EncodedTensor(BaseModel):
    """A tensor whose memory is given. ragged: each sample has a number of rows of its own."""

    model_config = ConfigDict(extra="forbid")
    dtype: DType
    shape: Any
    base64: Any
    ragged: bool = False


def decoded(name: str, given: EncodedTensor, element: ElementType, *, finite: bool) -> Work[Tensor]:
    """Its values, to be written as elements of that type; `finite`: others are refused.

    Raises FieldRefused.
    """
    if not isinstance(given.base64, Base64Text):
        raise FieldRefused(f"fields.{name}.base64 is no string")
    shape, text = _shape(name, given.shape), given.base64
    nbytes, size = prod(shape) * ELEMENTS[given.dtype].itemsize, text.decoded_size
    if size != nbytes:
        found = "no whole groups of four characters" if size is None else f"{size} bytes"
        raise FieldRefused(
            f"fields.{name}.base64 holds {found}, and {given.dtype} of shape {shape} is "
            f"{nbytes} bytes"
        )
    tensor, widens = Tensor.of_shape(shape), element.dtype is not DType.BFLOAT16
    tensor.ragged = given.ragged
    for piece in text.pieces(PIECE):
        if tensor.pieces:
            yield
        tensor.pieces.append(
            _values(name, given.dtype, _decoded(name, piece), finite=finite, widens=widens)
        )
    if sum(map(len, tensor.pieces)) != prod(shape):
        raise FieldRefused(f"fields.{name}.base64 is no base64: it is padded before its end")
    tensor.pieces = tensor.pieces or [np.empty(0, ELEMENTS[given.dtype])]
    return tensor


def _shape(name: str, given: object) -> tuple[int, ...]:
    if not isinstance(given, Tensor) or len(given.shape) != 1:
        raise FieldRefused(f"fields.{name}.shape is no list of dimensions")
    found = [size for piece in given.pieces for size in piece.tolist()]
    if not all(type(size) is int and size >= 0 for size in found):
        raise FieldRefused(f"fields.{name}.shape holds what is no dimension")
    return tuple(found)


def _decoded(name: str, piece: memoryview) -> bytes:
    try:
        return a2b_base64(piece, strict_mode=True)
    except NoBase64 as error:
        raise FieldRefused(f"fields.{name}.base64 is no base64: {error}") from None


def _values(name: str, dtype: DType, raw: bytes, *, finite: bool, widens: bool) -> NDArray[Any]:
    """Elements of a piece; bfloat16 as float32, or as it is where it stays that."""
    if len(raw) % ELEMENTS[dtype].itemsize:  # what its length has promised is not in it
        raise FieldRefused(f"fields.{name}.base64 is no base64: it is padded before its end")
    values = np.frombuffer(raw, ELEMENTS[dtype])
    if dtype is DType.BOOL and (values.view(np.uint8) > 1).any():
        raise FieldRefused(f"fields.{name} holds bytes other than 0 and 1, and is bool")
    if finite and not _are_finite(dtype, values):
        raise FieldRefused(
            f"fields.{name} holds NaN or infinities; they are taken with --allow-non-finite"
        )
    if dtype is DType.BFLOAT16 and widens:
        values = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values


def _are_finite(dtype: DType, values: NDArray[Any]) -> bool:
    if dtype is DType.BFLOAT16:
        return not ((values.view(np.uint16) & _EXPONENT) == _EXPONENT).any()
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
