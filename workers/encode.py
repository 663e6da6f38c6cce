"""Turn what a rollout worker holds (tensors, arrays, lists) into one contiguous span of bytes.

A field is *per-sample* if it has no dimensions or is named in `per_sample`; every other field is
*per-token*: its first dimension must be the number of tokens, which is the length of `input_ids`.
Fields are ordered by name, so that the order of a dict never matters.
torch tensors are recognised without importing torch.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatcher.errors import SampleRefused
from dispatcher.sample import DType, Field, Schema

#: Names that a micro-batch computes by itself; a field of that name would hide or be hidden.
RESERVED = frozenset({"cu_seqlens", "max_seqlen", "loss_weights", "loss_scale"})

_DTYPES = tuple(str(item) for item in DType)

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


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A sample ready to be sent; `span` is `schema.nbytes(tokens)` bytes."""

    schema: Schema
    tokens: int
    loss_tokens: int
    span: bytearray = field(repr=False)
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
    names = sorted(sample.fields)
    arrays = {name: _as_array(name, sample.fields[name]) for name in names}
    tokens = _token_count(arrays["input_ids"])
    schema = Schema(
        tuple(
            _describe(name, *arrays[name], tokens=tokens, per_sample=name in per_sample)
            for name in names
        )
    )
    span = bytearray(schema.nbytes(tokens))
    view = memoryview(span)
    for name, place in zip(names, schema.slices(tokens), strict=True):
        view[place] = arrays[name][0].reshape(-1).view(np.uint8).data
    return EncodedSample(
        schema=schema,
        tokens=tokens,
        loss_tokens=_loss_tokens(arrays, tokens),
        span=span,
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        group_size=sample.group_size,
        policy_version=sample.policy_version,
    )


def _token_count(input_ids: tuple[NDArray[Any], DType]) -> int:
    array, dtype = input_ids
    if not array.size:
        raise SampleRefused("empty", "the sample has no tokens: input_ids is empty")
    if array.ndim != 1 or array.dtype.kind not in "iu" or dtype is DType.BFLOAT16:
        raise SampleRefused(
            "bad-field", f"input_ids must be integers [tokens], not {dtype}{list(array.shape)}"
        )
    return int(array.size)


def _describe(
    name: str, array: NDArray[Any], dtype: DType, *, tokens: int, per_sample: bool
) -> Field:
    """The schema entry of one field; raises SampleRefused."""
    if name in RESERVED or not 1 <= len(name) <= 128:
        raise SampleRefused("bad-field", f"a field may not be called {name!r}")
    per_token = array.ndim > 0 and not per_sample
    if per_token and array.shape[0] != tokens:
        raise SampleRefused(
            "bad-field",
            f"{name} has {array.shape[0]} rows for {tokens} tokens; a field with one value a "
            f"sample is named in per_sample=({name!r},) when the producer is made",
        )
    shape = array.shape[1:] if per_token else array.shape
    if len(shape) > 8 or 0 in shape:
        raise SampleRefused("bad-field", f"{name} has the shape {list(array.shape)}")
    return Field(name, dtype, per_token, tuple(shape))


def _loss_tokens(arrays: Mapping[str, tuple[NDArray[Any], DType]], tokens: int) -> int:
    if "loss_mask" not in arrays:
        return tokens
    mask, dtype = arrays["loss_mask"]
    one = 0x3F80 if dtype is DType.BFLOAT16 else 1
    if mask.shape != (tokens,) or not np.isin(mask, (0, one)).all():
        raise SampleRefused("bad-field", "loss_mask must be zeros and ones, one a token")
    return int(np.count_nonzero(mask))


def _as_array(name: str, value: ArrayLike) -> tuple[NDArray[Any], DType]:
    """A C-contiguous little-endian array and its type on the wire."""
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
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise SampleRefused("bad-dtype", f"{name} is {dtype}; accepted are {', '.join(_DTYPES)}")
    tensor = tensor.detach().cpu().contiguous()
    if dtype == DType.BFLOAT16:
        import torch  # noqa: PLC0415  the caller has it, or there would be no tensor

        tensor = tensor.view(torch.int16)
    return tensor.numpy(), DType(dtype)
