"""Samples in and out of frames: cut a push into samples, gather samples into a micro-batch.

Gathering is the packing: a micro-batch goes out field by field, each field's values of all its
samples one after the other, so that a rank finds one tensor a field and concatenates nothing.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TypeVar

from dispatcher.sample import ALIGNMENT, Sample, Schema, aligned
from dispatcher.wire import messages as m
from dispatcher.wire.outbox import Buffer

_T = TypeVar("_T")

#: Values of a field below this size in all are joined: to copy them is cheaper than to list them.
JOINED_BYTES = 8 * 1024
#: Group size of a sample that belongs to a group and does not say how large it is.
UNKNOWN_GROUP_SIZE = 0


def samples_of(
    push: m.Push, spans: Iterable[memoryview], group_size: int | None = None
) -> tuple[Sample, ...]:
    """The samples of a push, one a span; `group_size` is that of groups whose samples do not say.

    Samples live as long as they are needed, so every span has to have memory of its own.
    """
    count = len(push.tokens)
    none = [None] * count
    group_ids = none if push.group_ids is None else push.group_ids
    default = UNKNOWN_GROUP_SIZE if group_size is None else group_size
    given = [default] * count if push.group_sizes is None else push.group_sizes
    sizes = [size if group else 1 for group, size in zip(group_ids, given, strict=True)]
    columns = zip(
        push.sample_ids, push.tokens, push.loss_tokens, repeat(push.schema_), spans,
        group_ids, sizes, none if push.policy_versions is None else push.policy_versions,
    )  # fmt: skip
    return tuple(map(Sample._make, columns))


def step_header(step: int, digest: str, num_micro_batches: int, samples: Iterable[Sample]) -> bytes:
    """The frame that announces a step, with the totals that normalisation needs."""
    held = list(samples)
    return m.encode(
        m.Step(
            step=step,
            digest=digest,
            num_micro_batches=num_micro_batches,
            fields=m.field_headers(held[0].schema),
            num_samples=len(held),
            tokens=sum(sample.tokens for sample in held),
            loss_tokens=sum(sample.loss_tokens for sample in held),
            loss_samples=sum(sample.loss_tokens > 0 for sample in held),
        )
    )


def micro_batch(step: int, index: int, samples: Sequence[Sample]) -> list[Buffer]:
    """The frame of one micro-batch: header and payload as buffers to write in order."""
    schema = samples[0].schema
    tokens = [sample.tokens for sample in samples]
    payload = _gather(schema, [sample.payload for sample in samples], tokens)
    header = m.MicroBatch(
        step=step,
        index=index,
        tokens=tokens,
        loss_tokens=[sample.loss_tokens for sample in samples],
        sample_ids=[sample.sample_id for sample in samples],
        group_ids=_unless_empty([sample.group_id for sample in samples]),
        policy_versions=_unless_empty([sample.policy_version for sample in samples]),
    )
    return [m.encode(header, sum(map(len, payload))), *payload]


def filler(step: int, index: int, sample: Sample) -> list[Buffer]:
    """A micro-batch of one real token and no loss, for a rank that has nothing to do."""
    first = _first_token(sample)
    payload = _gather(sample.schema, [memoryview(first)], [1])
    header = m.MicroBatch(
        step=step,
        index=index,
        is_filler=True,
        tokens=[1],
        loss_tokens=[0],
        sample_ids=[sample.sample_id],
    )
    return [m.encode(header, sum(map(len, payload))), *payload]


def _gather(schema: Schema, spans: list[memoryview], tokens: list[int]) -> list[Buffer]:
    """Field after field, the values of all spans, each field padded to the alignment."""
    buffers: list[Buffer] = []
    starts = [0] * len(spans)
    for per_token, per_sample in schema.units:
        sizes = [per_token * count + per_sample for count in tokens]
        stops = [start + size for start, size in zip(starts, sizes, strict=True)]
        values = [span[start:stop] for span, start, stop in zip(spans, starts, stops, strict=True)]
        size = sum(sizes)
        if size < JOINED_BYTES:
            buffers.append(b"".join(values).ljust(aligned(size), b"\0"))
        else:
            buffers += values
            if aligned(size) != size:
                buffers.append(bytes(aligned(size) - size))
        starts = [(stop + ALIGNMENT - 1) & -ALIGNMENT for stop in stops]  # `aligned`, unrolled
    return buffers


def _first_token(sample: Sample) -> bytes:
    """The span of this sample cut down to its first token."""
    parts = []
    for item, cut in zip(sample.schema.fields, sample.schema.slices(sample.tokens), strict=True):
        value = bytes(sample.payload[cut.start : cut.start + item.nbytes(1)])
        parts.append(value.ljust(aligned(len(value)), b"\0"))
    return b"".join(parts)


def _unless_empty(column: list[_T | None]) -> list[_T | None] | None:
    return column if any(value is not None for value in column) else None
