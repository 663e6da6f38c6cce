"""Turn what a rollout worker holds (tensors, arrays, lists) into one contiguous span of bytes.

A field is *per-sample* if it has no dimensions or is named in `per_sample`; every other field is
*per-token*: its first dimension must be the number of tokens, which is the length of `input_ids`.
Fields are ordered by name, so that the order of a dict never matters.
torch tensors are recognised without importing torch.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dispatcher.errors import SampleRefused
from dispatcher.sample import ALIGNMENT, DType, Field, Schema

#: Names that a micro-batch computes by itself; a field of that name would hide or be hidden.
RESERVED = frozenset({"cu_seqlens", "max_seqlen", "loss_weights", "loss_scale"})

_DTYPES = tuple(str(item) for item in DType)
#: Arrays of these types travel as they are.
_AS_IS = {
    np.dtype(str(item)).newbyteorder("<"): item for item in DType if item is not DType.BFLOAT16
}
#: Zeros after a field, by how many it takes to the next field's start.
_PADDING = [bytes(size) for size in range(ALIGNMENT)]

#: A tensor, an array, or nested lists of numbers.
ArrayLike = Any


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One finished rollout, as `push_many` and `push_group` take it.

    fields: `input_ids` [tokens] and any others; `loss_mask` [tokens] of zeros and ones says which
        tokens the loss counts (all of them without it).
    group_size: members that the group will have in the end.
    policy_version: version of the weights that generated the oldest token.
    """

    fields: Mapping[str, ArrayLike]
    sample_id: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    policy_version: int | None = None


class EncodedSample(NamedTuple):
    """A sample ready to be sent; `span` is `schema.nbytes(tokens)` bytes."""

    schema: Schema
    tokens: int
    loss_tokens: int
    span: bytes
    sample_id: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    policy_version: int | None = None


def encode_sample(sample: RolloutSample, per_sample: Collection[str] = ()) -> EncodedSample:
    """Copy a sample's fields into one span.

    Raises SampleRefused that names the field and what is wrong with it.
    """
    if "input_ids" not in sample.fields:
        raise SampleRefused("no-input-ids", "the sample has no field input_ids")
    arrays = {name: _as_array(name, sample.fields[name]) for name in sorted(sample.fields)}
    tokens = _token_count(*arrays["input_ids"])
    traits: list[tuple[str, DType, bool, tuple[int, ...]]] = []
    parts: list[Any] = []  # arrays, and the zeros between them
    for name, (array, dtype) in arrays.items():
        per_token = array.ndim > 0 and name not in per_sample
        if per_token and array.shape[0] != tokens:
            raise _not_per_token(name, array.shape[0], tokens)
        traits.append((name, dtype, per_token, array.shape[1:] if per_token else array.shape))
        parts.append(array)
        parts.append(_PADDING[-array.nbytes % ALIGNMENT])
    return EncodedSample(
        _schema(tuple(traits)),
        tokens,
        _loss_tokens(arrays, tokens),
        b"".join(parts),  # straight from the arrays' memory: the only copy
        sample.sample_id,
        sample.group_id,
        sample.group_size,
        sample.policy_version,
    )


def _token_count(array: NDArray[Any], dtype: DType) -> int:
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


@lru_cache(maxsize=64)
def _schema(traits: tuple[tuple[str, DType, bool, tuple[int, ...]], ...]) -> Schema:
    """The schema of fields with these names, types and shapes; raises SampleRefused."""
    for name, _, _, shape in traits:
        if name in RESERVED or not 1 <= len(name) <= 128:
            raise SampleRefused("bad-field", f"a field may not be called {name!r}")
        if len(shape) > 8 or 0 in shape:
            raise SampleRefused("bad-field", f"{name} has values of the shape {list(shape)}")
    return Schema(tuple(Field(*trait) for trait in traits))


def _loss_tokens(arrays: Mapping[str, tuple[NDArray[Any], DType]], tokens: int) -> int:
    if "loss_mask" not in arrays:
        return tokens
    mask, dtype = arrays["loss_mask"]
    one = 0x3F80 if dtype is DType.BFLOAT16 else 1
    if mask.shape != (tokens,) or not (dtype is DType.BOOL or np.isin(mask, (0, one)).all()):
        raise SampleRefused("bad-field", "loss_mask must be zeros and ones, one a token")
    return int(np.count_nonzero(mask))


def _as_array(name: str, value: ArrayLike) -> tuple[NDArray[Any], DType]:
    """A C-contiguous little-endian array and its type on the wire."""
    if type(value) is np.ndarray and value.flags.c_contiguous:
        known = _AS_IS.get(value.dtype)
        if known is not None:
            return value, known
    if type(value).__module__.partition(".")[0] == "torch":
        return _from_torch(name, value)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SampleRefused("bad-field", f"{name} is no array: {error}") from error
    if not isinstance(value, (np.ndarray, np.generic)) and array.dtype == np.float64:
        # Python floats: trainers hold them in float32, and nobody asked for twice the bytes.
        array = array.astype(np.float32)
    if array.dtype.name not in _DTYPES:
        raise SampleRefused(
            "bad-dtype", f"{name} is {array.dtype.name}; accepted are {', '.join(_DTYPES)}"
        )
    # order="C", not ascontiguousarray: that one makes a dimension out of none.
    array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    return array, DType(array.dtype.name)


def _from_torch(name: str, tensor: Any) -> tuple[NDArray[Any], DType]:
    dtype = _torch_dtype(name, tensor.dtype)
    tensor = tensor.detach().cpu().contiguous()
    if dtype is DType.BFLOAT16:
        import torch  # noqa: PLC0415  the caller has it, or there would be no tensor

        tensor = tensor.view(torch.int16)
    return tensor.numpy(), dtype


@lru_cache(maxsize=256)
def _torch_dtype(name: str, dtype: object) -> DType:
    """The type on the wire of a torch.dtype; raises SampleRefused that names the field."""
    word = str(dtype).removeprefix("torch.")
    if word not in _DTYPES:
        raise SampleRefused("bad-dtype", f"{name} is {word}; accepted are {', '.join(_DTYPES)}")
    return DType(word)
