"""Samples as JSON: what `POST /v1/samples` takes, turned into the spans of the sample plane.

    {"fields": {"input_ids": [1, 2, 3], "loss_mask": [false, true, true]},
     "group_id": "p17", "group_size": 8, "policy_version": 3}

A list of numbers is a tensor, whose element type `tensors` finds; `{"dtype": "float64", "data":
[...]}` declares one. A string is a text. A field with as many rows as `input_ids` is per token, any
other is per sample, unless `per_sample` names it, the run's samples have it so, or it is declared
`"ragged": true` beside its `dtype`, with rows of its own. `loss_mask` marks the tokens that are
targets of the loss, predicted from those before them; without one all are. The first token never
is. With `"loss_mask_shifted": true` beside the fields position i of the mask is for token i + 1.
"""

import re
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic import Field as Declared

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.hints import nearest
from rollout_dispatcher.protocol.messages import MAX_FIELDS, Extent, FieldHeader, Name, Version
from rollout_dispatcher.sample import (
    METADATA,
    SIZE_AT_CLOSE,
    SIZE_UNKNOWN,
    DType,
    Field,
    Sample,
    Schema,
    content_checksum,
    is_reserved,
)
from rollout_dispatcher.service.http.bodies import Work
from rollout_dispatcher.service.http.json_text import CLOSE, END, OPEN, JsonText
from rollout_dispatcher.service.http.tensors import (
    ElementType,
    FieldRefused,
    Reading,
    Tensor,
    element_type,
)
from rollout_dispatcher.values import NUMPY_DTYPES, negative_id

#: Samples of one request: each takes a kilobyte and a tenth of a millisecond, however short.
MAX_SAMPLES: Final = 4096
INTEGERS: Final = {item for item, dtype in NUMPY_DTYPES.items() if dtype.kind in "iu"}
#: Fields that always have one value a token.
PER_TOKEN: Final = frozenset(("input_ids", "loss_mask"))
#: The work of making a sample, in bytes of text that are parsed in the same time.
SAMPLE_WORK: Final = 4096
#: A `group_size` that is declared when the group is closed.
AT_CLOSE: Final = "at-close"
#: As in `group_size.constrained-int` and `group_size.literal['at-close']`.
_ALTERNATIVE: Final = re.compile(r"constrained-\w+|literal\[.*\]")


class TypedTensor(BaseModel):
    """A tensor with its element type, which is str for a text. ragged: its rows are its own."""

    model_config = ConfigDict(extra="forbid")
    dtype: DType
    data: Any
    ragged: bool = False


class PushRequest(BaseModel):
    """One sample."""

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

    fields: Annotated[
        dict[Name, Any],
        Declared(
            max_length=MAX_FIELDS,
            description="tensors by name, or texts; input_ids is required; loss_mask says which "
            "tokens are targets of the loss, all without it; the first never is",
        ),
    ]
    loss_mask_shifted: Annotated[
        bool,
        Declared(description="whether position i of loss_mask is for token i + 1"),
    ] = False
    per_sample: Annotated[
        list[Name],
        Declared(
            max_length=MAX_FIELDS,
            default_factory=list,
            description="fields that have one value a sample, whatever their first dimension is",
        ),
    ]


class Read(NamedTuple):
    """Samples of a body. named: whether their ids were given. left_out: see `m.Push`."""

    samples: list[Sample]
    named: bool
    left_out: int


def read_samples(body: bytes | bytearray, reading: Reading) -> Work[Read]:
    """Return the samples of a body: one object, an array of objects, or an object a line.

    Raises ProtocolError, with the place.
    """
    if body.startswith(b"\xef\xbb\xbf"):
        raise ProtocolError("the body begins with a byte order mark, which JSON has none of")
    text = JsonText(body, finite=not reading.allow_non_finite)
    samples, named = list[Sample](), set[bool]()
    left_out, known = 0, PushRequest.model_fields
    is_array = text.take(OPEN)
    goes_on = not text.take(CLOSE) if is_array else text.peek() != END
    while goes_on:
        text.peek()
        start = text.at
        given = yield from text.object()
        try:
            request = PushRequest.model_validate(given)
            sample, skipped = yield from _sample(request, reading)
        except ValidationError as error:
            text.fail(_beside(given, known) or first_of(error, known), start)
        except FieldRefused as error:
            text.fail(str(error), start)
        samples.append(sample)
        left_out += skipped
        named.add(request.sample_id is not None)
        if len(named) > 1:
            text.fail("either all samples of a request have a sample_id or none has", start)
        if len(samples) > MAX_SAMPLES:
            text.fail(f"a request has more than {MAX_SAMPLES} samples; cut it into several", start)
        if text.worked(SAMPLE_WORK):
            yield
        goes_on = text.goes_on(CLOSE) if is_array else text.begins_line()
    if text.peek() != END:
        text.fail("the body ends behind the array")
    if not samples:
        raise ProtocolError("the body holds no sample")
    return Read(samples, named.pop(), left_out)


def first_of(error: ValidationError, known: Iterable[str] = ()) -> str:
    """Return the first error in words, with the place. known: valid keys.

    Unknown keys come first, as one may be meant by a missing key.
    """
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = min(found, key=lambda each: each["type"] != "extra_forbidden")
    place = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{place}: there is no such key{nearest(place[:60], known)}"
    of_all = dict.fromkeys(_words(each["msg"]) for each in found if _place(each["loc"]) == place)
    words = " or ".join(of_all)
    return f"{place}: {words}" if place else words


def _beside(given: dict[str, Any], known: Iterable[str]) -> str | None:
    """Return the error text if the first unknown key is a field beside `fields`."""
    name = next((name for name in given if name not in known), None)
    if name is None or not (isinstance(given[name], Tensor) or not nearest(name[:60], known)):
        return None
    inside = f'{{"fields": {{"{name}": ...}}}}'
    return f"{name}: there is no such key; tensors, numbers and texts stand in fields: {inside}"


def _place(parts: tuple[int | str, ...]) -> str:
    """Return the place without pydantic's names for the alternatives of a value."""
    return ".".join(part for part in map(str, parts) if not _ALTERNATIVE.fullmatch(part))


def _words(message: str) -> str:
    """Return pydantic's message in the words of our other errors."""
    message = message.removeprefix("Value error, ").replace("Field required", "it is missing")
    message = re.sub(r" or instance of \w+| after validation, not \d+", "", message)
    return re.sub(r"^(Input|String|Dictionary|List) should", "it must", message)


def _sample(request: PushRequest, reading: Reading) -> Work[tuple[Sample, int]]:
    """Return a sample, and how many positions that its mask marks are left out."""
    given = {name: _tensor(name, request.fields[name], reading) for name in sorted(request.fields)}
    _check_per_sample(request)
    group_size = _group_size(request, reading)
    ids = given.get("input_ids")
    if ids is None or len(ids[0].shape) != 1 or ids[1].dtype not in INTEGERS:
        raise FieldRefused("fields.input_ids must be a list of integers")
    _check_ids(ids[0])
    (tokens,) = ids[0].shape
    loss_tokens, left_out = max(0, tokens - 1), 0
    if (mask := given.get("loss_mask")) is not None:
        if request.loss_mask_shifted:
            mask[0].roll()
        loss_tokens, left_out = _loss_tokens(mask[0], ids[0].shape)
    schema = _schema(given, tokens, frozenset(request.per_sample), reading)
    rows = tuple(given[name][0].shape[0] for name in schema.ragged)
    span = memoryview(bytearray(schema.nbytes(tokens, rows)))
    places = schema.slices(tokens, rows)
    for (name, (tensor, element)), place in zip(given.items(), places, strict=True):
        yield from tensor.written(name, element, span[place])
    checksum = None
    if request.sample_id is not None:
        facts = (tokens, rows, request.group_id, request.policy_version)
        checksum = content_checksum([span], *facts)
    sample = Sample(
        sample_id=request.sample_id or f"http/{uuid.uuid4().hex}",
        tokens=tokens,
        loss_tokens=loss_tokens,
        schema=schema,
        payload=span.toreadonly(),
        group_id=request.group_id,
        group_size=group_size,
        policy_version=request.policy_version,
        rows=rows,
        staleness_exempt=request.staleness_exempt,
        checksum=checksum,
    )
    return sample, left_out


def _group_size(request: PushRequest, reading: Reading) -> int:
    """Return the size, or a marker. Raises FieldRefused for a size without a group."""
    size = request.group_size
    if request.group_id is None:
        if size not in (None, 1):
            raise FieldRefused(
                f"group_size is {size}, and no group_id says which samples belong together"
            )
        return 1
    if size is None:
        return SIZE_UNKNOWN if reading.group_size is None else reading.group_size
    return SIZE_AT_CLOSE if size == AT_CLOSE else int(size)


def _check_per_sample(request: PushRequest) -> None:
    for name in request.per_sample:
        if name in PER_TOKEN:
            raise FieldRefused(f"per_sample names {name}, which has one value a token")
        if name not in request.fields:
            raise FieldRefused(f"per_sample names {name}, which is not among the fields")


def _schema(
    given: dict[str, tuple[Tensor, ElementType]],
    tokens: int,
    per_sample: frozenset[str],
    reading: Reading,
) -> Schema:
    found = Schema(
        tuple(
            _field(
                name, element.dtype, tensor,
                None if name in per_sample else tokens, reading.known(name),
            )
            for name, (tensor, element) in given.items()
        )
    )  # fmt: skip
    known = reading.schema  # one object is soon compared
    return known if known is not None and found == known else found


def _check_ids(ids: Tensor) -> None:
    """Raise FieldRefused for a negative token id."""
    at = 0
    for piece in ids.pieces:
        if piece.dtype.kind in "if" and len(piece) and piece.min() < 0:
            within = int(np.argmax(piece < 0))
            place = f"fields.input_ids[{at + within}]"
            raise FieldRefused(negative_id(place, int(piece[within])))
        at += len(piece)


def _loss_tokens(mask: Tensor, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of loss tokens, and of left out ones: 1 if the mask marks the first."""
    if mask.shape != shape:
        raise FieldRefused(f"fields.loss_mask has shape {mask.shape}, input_ids {shape}")
    if not all(((piece == 0) | (piece == 1)).all() for piece in mask.pieces):
        raise FieldRefused(
            "fields.loss_mask must be zeros and ones, one a token; weights of other "
            "values are a field of their own, which the trainer multiplies its loss by"
        )
    left_out = sum(int(np.count_nonzero(piece[:1])) for piece in mask.pieces[:1])
    return sum(int(np.count_nonzero(piece)) for piece in mask.pieces) - left_out, left_out


def _tensor(name: str, value: Any, reading: Reading) -> tuple[Tensor, ElementType]:
    """Return a field's values and their element type."""
    if is_reserved(name):
        raise FieldRefused(f"a field may not be called {name!r}")
    if name in METADATA:
        raise FieldRefused(f"{name} is no field of a sample; give it beside them, not in fields")
    try:
        typed = TypedTensor.model_validate(value) if isinstance(value, dict) else None
    except ValidationError as error:
        raise FieldRefused(f"fields.{name}: {first_of(error)}") from None
    if typed is not None and typed.dtype is DType.BFLOAT16:
        raise FieldRefused(f"fields.{name}: numbers are no bfloat16; send float32")
    values = value if typed is None else typed.data
    if isinstance(values, str) and (typed is None or typed.dtype is DType.STR):
        values = Tensor.text(values)
    if not isinstance(values, Tensor):
        try:
            values = Tensor.scalar(values)
        except ValueError:
            raise FieldRefused(f"fields.{name} is no tensor of numbers or booleans") from None
    given = None if typed is None else typed.dtype
    values.ragged |= typed is not None and typed.ragged
    return values, element_type(name, values, given, reading)


def _field(
    name: str, dtype: DType, tensor: Tensor, tokens: int | None, known: Field | None
) -> Field:
    """tokens: None for a field that `per_sample` names."""
    shape = tensor.shape
    if tensor.ragged or (known is not None and known.ragged):
        return _ragged(name, dtype, shape, known)
    per_token = len(shape) > 0 and shape[0] == tokens
    if known is not None and not known.per_token and known.shape == shape:
        per_token = False  # a sample of as many tokens as this field has values
    return _checked(name, dtype, shape, Field(name, dtype, per_token, shape[per_token:]))


def _ragged(name: str, dtype: DType, shape: tuple[int, ...], known: Field | None) -> Field:
    """Return a ragged field; an empty list has no rows, of any shape."""
    if name in ("input_ids", "loss_mask"):
        raise FieldRefused(f"fields.{name} is a list of numbers, one a token")
    if not shape:
        raise FieldRefused(f"fields.{name} is ragged, and one number has no rows")
    beyond = known.shape if known is not None and shape == (0,) else shape[1:]
    return _checked(name, dtype, shape, Field(name, dtype, False, beyond, True))


def _checked(name: str, dtype: DType, shape: tuple[int, ...], field: Field) -> Field:
    try:  # the header of a step has to hold the field
        FieldHeader(name=name, dtype=dtype, per_token=field.per_token, shape=list(field.shape))
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"]
        raise FieldRefused(f"fields.{name} has shape {shape}: {why}") from None
    return field
