"""Samples as JSON: what `POST /v1/samples` takes, turned into the spans of the sample plane.

    {"fields": {"input_ids": [1, 2, 3], "loss_mask": [false, true, true]},
     "group_id": "p17", "group_size": 8, "policy_version": 3}

A list of numbers is a tensor, whose element type is found in `tensors`;
`{"dtype": "float64", "data": [...]}` says otherwise. A field whose first dimension has as many
entries as `input_ids` is per token, any other is per sample, unless the run's samples have it so.
`loss_mask` says of each token whether it is a target of the loss, predicted from those before it;
without one, all but the first are.
"""

import json
import uuid
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic import Field as Declared

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol.messages import MAX_FIELDS, Extent, FieldHeader, Name, Version
from rollout_dispatcher.sample import (
    METADATA,
    RESERVED,
    SIZE_AT_CLOSE,
    SIZE_NOT_TOLD,
    DType,
    Field,
    Sample,
    Schema,
)
from rollout_dispatcher.service.http.tensors import Array, Reading, read_tensor
from rollout_dispatcher.spans import join

#: What a `group_size` says that is told when the group is closed.
AT_CLOSE = "at-close"


class PushRequest(BaseModel):
    """One sample."""

    model_config = ConfigDict(extra="forbid", strict=True)
    fields: Annotated[
        dict[Name, Any],
        Declared(
            max_length=MAX_FIELDS,
            description="tensors by name; input_ids is required; loss_mask says which "
            "tokens are targets of the loss, all but the first without it",
        ),
    ]
    sample_id: Name | None = None
    group_id: Name | None = None
    group_size: Extent | Literal["at-close"] | None = None
    policy_version: Version | None = None


def parse_body(body: bytes | bytearray, reading: Reading) -> tuple[tuple[Sample, ...], bool]:
    """Samples of a body that is one object, an array of objects, or an object a line.

    Also returns whether their ids were given. Raises pydantic's ValidationError or ProtocolError.
    """
    requests = [PushRequest.model_validate(item) for item in _objects(body)]
    if not requests:
        raise ProtocolError("the body holds no sample")
    named = {request.sample_id is not None for request in requests}
    if len(named) > 1:
        raise ProtocolError("either all samples of a request have a sample_id or none has")
    return tuple(_sample(request, reading) for request in requests), named.pop()


def _objects(body: bytes | bytearray) -> list[Any]:
    try:
        return _parse(body)
    except RecursionError:
        raise ProtocolError("the body nests its brackets too deeply") from None


def _parse(body: bytes | bytearray) -> list[Any]:
    try:
        found = json.loads(body)
        return found if isinstance(found, list) else [found]
    except json.JSONDecodeError as error:
        lines = [line for line in body.splitlines() if line.strip()]
        if len(lines) < 2:
            raise ProtocolError(f"the body is no JSON: {error}") from None
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ProtocolError(f"the body is neither JSON nor NDJSON: {error}") from None


def _sample(request: PushRequest, reading: Reading) -> Sample:
    arrays = {name: _array(name, value, reading) for name, value in request.fields.items()}
    ids = arrays.get("input_ids")
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ProtocolError("fields.input_ids must be a list of integers")
    tokens = len(ids)
    mask = arrays.get("loss_mask")
    if mask is not None and mask.shape != ids.shape:
        raise ProtocolError(f"fields.loss_mask has shape {mask.shape}, input_ids {ids.shape}")
    if mask is not None and not np.isin(mask, (0, 1)).all():
        raise ProtocolError("fields.loss_mask must be zeros and ones, one a token")
    size = SIZE_NOT_TOLD if reading.group_size is None else reading.group_size
    if request.group_size is not None:
        size = SIZE_AT_CLOSE if request.group_size == AT_CLOSE else int(request.group_size)
    return Sample(
        sample_id=request.sample_id or f"http/{uuid.uuid4().hex}",
        tokens=tokens,
        loss_tokens=max(0, tokens - 1) if mask is None else int(np.count_nonzero(mask)),
        schema=_schema(arrays, tokens, reading.schema),
        payload=memoryview(join(arrays[name].tobytes() for name in sorted(arrays))),
        group_id=request.group_id,
        group_size=size if request.group_id is not None else 1,
        policy_version=request.policy_version,
    )


def _array(name: str, value: Any, reading: Reading) -> Array:
    if name in RESERVED:
        raise ProtocolError(f"a field may not be called {name!r}")
    if name in METADATA:
        raise ProtocolError(f"{name} is no field of a sample; give it beside them, not in fields")
    return read_tensor(name, value, reading)


def _schema(arrays: dict[str, Array], tokens: int, known: Schema | None) -> Schema:
    by_name = {} if known is None else known.by_name
    found = Schema(
        tuple(_field(name, arrays[name], tokens, by_name.get(name)) for name in sorted(arrays))
    )
    return known if known is not None and found == known else found  # one object is soon compared


def _field(name: str, array: Array, tokens: int, known: Field | None) -> Field:
    per_token = array.ndim > 0 and len(array) == tokens
    if known is not None and not known.per_token and known.shape == array.shape:
        per_token = False  # a sample of as many tokens as this field has values
    shape = array.shape[1:] if per_token else array.shape
    dtype = DType(array.dtype.name)
    try:  # ranks are told of the field in these words, so it has to keep to their limits
        FieldHeader(name=name, dtype=dtype, per_token=per_token, shape=list(shape))
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"]
        raise ProtocolError(f"fields.{name} has shape {array.shape}: {why}") from None
    return Field(name, dtype, per_token, tuple(shape))
