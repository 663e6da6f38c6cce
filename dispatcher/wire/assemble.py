"""Samples in and out of frames: cut a push into samples, gather samples into a micro-batch.

Gathering is the packing: a micro-batch goes out field by field, each field's values of all its
samples one after the other, so that a rank finds one tensor a field and concatenates nothing.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from dispatcher.sample import Sample, Schema, aligned
from dispatcher.wire import messages as m

Buffer = bytes | memoryview
_T = TypeVar("_T")

#: Group size of a sample that belongs to a group and does not say how large it is.
UNKNOWN_GROUP_SIZE = 0


def samples_of(
    push: m.Push, payload: memoryview, group_size: int | None = None
) -> tuple[Sample, ...]:
    """The samples of a push; `group_size` is that of groups whose samples do not say.

    A sample that shares its frame with others gets memory of its own, so that the frame does not
    live as long as its last sample. Raises ProtocolError when header and payload disagree.
    """
    schema = push.schema_
    spans = push.spans(payload)
    if len(push.tokens) > 1:
        spans = (memoryview(bytes(span)) for span in spans)
    default = UNKNOWN_GROUP_SIZE if group_size is None else group_size
    group_ids = push.group_ids or [None] * len(push.tokens)
    versions = push.policy_versions or [None] * len(push.tokens)
    sizes = push.group_sizes or [default] * len(push.tokens)
    columns = zip(
        push.sample_ids, push.tokens, push.loss_tokens, spans, group_ids, sizes, versions,
        strict=True,
    )  # fmt: skip
    return tuple(
        Sample(name, tokens, loss_tokens, schema, span, group, size if group else 1, version)
        for name, tokens, loss_tokens, span, group, size, version in columns
    )


def step_header(step: int, digest: str, num_micro_batches: int, samples: Iterable[Sample]) -> bytes:
    """The frame that announces a step, with the totals that normalisation needs."""
    held = list(samples)
    return m.encode(
        m.Step(
            step=step,
            digest=digest,
            num_micro_batches=num_micro_batches,
            num_samples=len(held),
            tokens=sum(sample.tokens for sample in held),
            loss_tokens=sum(sample.loss_tokens for sample in held),
            loss_samples=sum(sample.loss_tokens > 0 for sample in held),
        )
    )


def micro_batch(step: int, index: int, samples: Sequence[Sample]) -> list[Buffer]:
    """The frame of one micro-batch: header and payload as buffers to write in order."""
    schema = samples[0].schema
    payload = _gather(schema, [(sample.payload, sample.tokens) for sample in samples])
    header = m.MicroBatch(
        step=step,
        index=index,
        fields=m.field_headers(schema),
        tokens=[sample.tokens for sample in samples],
        loss_tokens=[sample.loss_tokens for sample in samples],
        sample_ids=[sample.sample_id for sample in samples],
        group_ids=_unless_empty([sample.group_id for sample in samples]),
        policy_versions=_unless_empty([sample.policy_version for sample in samples]),
    )
    return [m.encode(header, sum(map(len, payload))), *payload]


def filler(step: int, index: int, sample: Sample) -> list[Buffer]:
    """A micro-batch of one real token and no loss, for a rank that has nothing to do."""
    first = _first_token(sample)
    payload = _gather(sample.schema, [(memoryview(first), 1)])
    header = m.MicroBatch(
        step=step,
        index=index,
        is_filler=True,
        fields=m.field_headers(sample.schema),
        tokens=[1],
        loss_tokens=[0],
        sample_ids=[sample.sample_id],
    )
    return [m.encode(header, sum(map(len, payload))), *payload]


def _gather(schema: Schema, spans: list[tuple[memoryview, int]]) -> list[Buffer]:
    """Field after field, the values of all spans, each field padded to the alignment."""
    slices = [schema.slices(tokens) for _, tokens in spans]
    buffers: list[Buffer] = []
    for at in range(len(schema.fields)):
        size = 0
        for (span, _), cuts in zip(spans, slices, strict=True):
            buffers.append(span[cuts[at]])
            size += cuts[at].stop - cuts[at].start
        if aligned(size) != size:
            buffers.append(bytes(aligned(size) - size))
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
