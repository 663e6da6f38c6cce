"""Samples in and out of frames: cut a push into samples, gather samples into a micro-batch.

Gathering is the packing: a micro-batch goes out field by field, each field's values of all its
samples one after the other, so that a rank finds one tensor a field and concatenates nothing. What
lies in a payload store stays there: a micro-batch says where, and the rank fetches it.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import compress, repeat
from typing import Any

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import (
    InMemory,
    Payload,
    Reference,
    StoredObject,
    are_in_memory,
    count_references,
)
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import JOINED_BYTES, Buffer
from rollout_dispatcher.protocol.slices import Slicing
from rollout_dispatcher.sample import (
    SIZE_AT_CLOSE,
    SIZE_UNKNOWN,
    Sample,
    SamplesByField,
    Schema,
)
from rollout_dispatcher.spans import ALIGNMENT, PADDING, TOKENS, RowsByField

#: The sample of these values: `Sample._make` without its check of their number.
_SAMPLE = partial(tuple.__new__, Sample)


def samples_of(
    push: m.Push, spans: Iterable[memoryview], group_size: int | None = None
) -> tuple[Sample, ...]:
    """The samples of a push, one a span; `group_size` is that of groups whose samples do not say.

    Samples live as long as they are needed, so every span has to have memory of its own. Raises
    ProtocolError for samples that cannot lie in objects as the push says.
    """
    payloads: Iterable[Payload] = spans if push.places is None else _placed(push, spans)
    sizes: Iterable[int] = repeat(1)
    if push.group_ids is not None:
        default = SIZE_UNKNOWN if group_size is None else group_size
        given: Iterable[int] = repeat(default)
        if push.group_sizes is not None:
            given = (size or SIZE_AT_CLOSE for size in push.group_sizes)
        sizes = [size if group else 1 for group, size in zip(push.group_ids, given, strict=False)]
    rows = push.rows_of(push.schema_) if push.rows else ()
    values = zip(
        push.sample_ids, push.tokens, push.loss_tokens, repeat(push.schema_), payloads,
        push.group_ids or repeat(None), sizes, push.policy_versions or repeat(None),
        zip(*rows, strict=True) if rows else repeat(()), push.staleness_exempt or repeat(False),
        push.checksums or repeat(None),
    )  # fmt: skip
    return tuple(map(_SAMPLE, values))


def _placed(push: m.Push, spans: Iterable[memoryview]) -> list[Payload]:
    """Where the span of each sample is: as it came, or in an object."""
    references = push.references(push.schema_)
    if len({place[0] for place in push.places or () if place}) < len(push.objects or ()):
        raise ProtocolError("the push names an object that none of its samples lies in")
    return [
        span if reference is None else reference
        for span, reference in zip(spans, references, strict=True)
    ]


def step_header(
    step: int,
    digest: str,
    num_micro_batches: int,
    samples: Iterable[Sample],
    *,
    group_loss_tokens: Sequence[int] | None = None,
    expected_loss_tokens: int | None = None,
    attempt: int = 0,
) -> bytes:
    """The frame that announces a step, with the totals that normalisation needs."""
    held = SamplesByField.of(samples)
    return codec.encode(
        m.StepHeader(
            step=step,
            digest=digest,
            num_micro_batches=num_micro_batches,
            fields=m.field_headers(held.schemas[0]),
            num_samples=len(held.tokens),
            tokens=sum(held.tokens),
            loss_tokens=sum(held.loss_tokens),
            loss_samples=len(held.tokens) - held.loss_tokens.count(0),
            group_loss_tokens=None if group_loss_tokens is None else list(group_loss_tokens),
            expected_loss_tokens=expected_loss_tokens,
            attempt=attempt,
            num_referenced=count_references(held.payloads),
        )
    )


def micro_batch(
    step: int,
    index: int,
    samples: Sequence[Sample],
    group_numbers: Sequence[int] | None = None,
    *,
    attempt: int = 0,
    block: tuple[int, int] = (1, 0),
    slicing: Slicing | None = None,
    multiple: int = 1,
) -> list[Buffer]:
    """The frame of one micro-batch: header and payload as buffers to write in order.

    block: ranks that train it together, and the place of this one among them. slicing, multiple:
    what it has of its samples, see `Slicing`; None: the whole of them.
    """
    held = SamplesByField.of(samples)
    header: dict[str, object] = {
        "step": step,
        "index": index,
        "tokens": held.tokens,
        "loss_tokens": held.loss_tokens,
        "sample_ids": held.sample_ids,
    }
    if attempt:
        header["attempt"] = attempt
    if block[0] > 1:
        header["cp_size"], header["cp_rank"] = block
    if any(held.group_ids):
        header["group_ids"] = held.group_ids
    if held.policy_versions.count(None) < len(samples):
        header["policy_versions"] = held.policy_versions
    if group_numbers is not None:
        header["group_numbers"] = group_numbers
    schema, rows = held.schemas[0], tuple[tuple[int, ...], ...]()
    if schema.ragged:
        rows = tuple(zip(*held.rows, strict=True))
        header["rows"] = dict(zip(schema.ragged, rows, strict=True))
    ranges = None
    if slicing is not None and block[0] > 1:
        size, place = block
        ranges = [slicing.ranges(tokens, multiple, place, size) for tokens in held.tokens]
        header["ranges"] = ranges
    if are_in_memory(held.payloads):
        payload, nbytes = _gather(schema, held.payloads, held.tokens, rows, ranges)
    else:
        header |= places_of(held.payloads)
        here = [not isinstance(payload, Reference) for payload in held.payloads]
        payload, nbytes = _gather_some(schema, held, rows, ranges, here)
    return [codec.encode_checked(m.MicroBatch, header, nbytes), *payload]


def places_of(payloads: Iterable[Payload | None]) -> dict[str, Any]:
    """What a header says of samples with these payloads: `objects` and `places`.

    All but references are taken to be in the frame's payload.
    """
    objects: dict[StoredObject, int] = {}
    places = [
        (objects.setdefault(payload.stored, len(objects)), payload.offset)
        if isinstance(payload, Reference)
        else None
        for payload in payloads
    ]
    headers = [m.ObjectHeader(store=at.store, key=at.key, nbytes=at.nbytes) for at in objects]
    return {"objects": headers, "places": places}


def _gather_some(
    schema: Schema,
    held: SamplesByField,
    rows: RowsByField,
    ranges: Sequence[Sequence[tuple[int, int]]] | None,
    here: Sequence[bool],
) -> tuple[list[Buffer], int]:
    """`_gather` of those that are in the frame's payload."""
    spans = list(compress(held.payloads, here))
    assert are_in_memory(spans)
    if not spans:
        return [], 0
    return _gather(
        schema,
        spans,
        list(compress(held.tokens, here)),
        [list(compress(counts, here)) for counts in rows],
        None if ranges is None else list(compress(ranges, here)),
    )


def filler(step: int, index: int, sample: Sample, *, attempt: int = 0) -> list[Buffer]:
    """A micro-batch of one token, no rows and no loss, for a rank that has nothing to do.

    It is the sample's first token, or zeros if that is not here: a token that any model knows.
    """
    schema = sample.schema
    if isinstance(sample.payload, InMemory):
        first = schema.first_token(sample.payload, sample.tokens, sample.rows)
    else:
        first = bytes(schema.nbytes(1, [0] * len(schema.ragged)))
    rows = {name: [0] for name in schema.ragged}
    payload, nbytes = _gather(schema, [memoryview(first)], [1], list(rows.values()))
    header = m.MicroBatch(
        step=step,
        index=index,
        is_filler=True,
        attempt=attempt,
        tokens=[1],
        loss_tokens=[0],
        sample_ids=[sample.sample_id],
        rows=rows or None,
    )
    return [codec.encode(header, nbytes), *payload]


def _gather(
    schema: Schema,
    spans: Sequence[memoryview],
    tokens: Sequence[int],
    rows: RowsByField,
    ranges: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> tuple[list[Buffer], int]:
    """Field after field, the values of all spans, each field padded; and the bytes in all.

    ranges: of each sample the tokens whose values are wanted; None: of all.
    """
    values, stride = schema.cut(spans, tokens, rows), len(schema.units)
    counts = (sum(tokens), len(tokens), *map(sum, rows))
    buffers: list[Buffer] = []
    nbytes = 0
    for at, (unit, by) in enumerate(schema.units):
        own, size = values[at::stride], unit * counts[by]
        if ranges is not None and by == TOKENS:
            own = [
                each[start * unit : stop * unit]
                for each, wanted in zip(own, ranges, strict=True)
                for start, stop in wanted
            ]
            size = sum(map(len, own))
        padding = PADDING[size % ALIGNMENT]
        nbytes += size + len(padding)
        if size < JOINED_BYTES:
            buffers.append(b"".join(own) + padding)
        else:
            buffers += own
            buffers.append(padding)
    return buffers, nbytes
