"""Cut a list of samples into pushes, each the size of a frame, and say what a push consists of."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import not_
from typing import Any, TypeVar

from pydantic import ValidationError

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import JOINED_BYTES, Buffer
from rollout_dispatcher.spans import ALIGNMENT, PADDING
from rollout_workers.metadata import refusal
from rollout_workers.producer.encode import EncodedSample
from rollout_workers.producer.stored.placing import Put

_T = TypeVar("_T")

#: One frame's worth of samples: large enough that headers do not matter, small enough that a
#: heartbeat behind it is not late, and that the header stays far below any limit.
BATCH_BYTES = 8 * 1024 * 1024
BATCH_SAMPLES = 256


def batches(
    samples: Sequence[EncodedSample], max_payload_bytes: int
) -> Iterator[Sequence[EncodedSample]]:
    """Consecutive runs of samples that one push can carry; all of them have references, or none."""
    limit = min(BATCH_BYTES, max_payload_bytes)
    start, nbytes = 0, 0
    for stop, sample in enumerate(samples):
        full = nbytes + sample.nbytes > limit or stop - start >= BATCH_SAMPLES
        if stop > start and (full or not _alike(sample, samples[start])):
            yield samples[start:stop]
            start, nbytes = stop, 0
        nbytes += sample.nbytes
    if len(samples) > start:
        yield samples[start:]


def header(samples: Sequence[EncodedSample], client_id: str, first_seq: int) -> m.Push:
    """The message of a push; samples without an id are named by their number.

    Raises SampleRefused for metadata that no dispatcher takes.
    """
    group_ids = _unless_empty([sample.group_id for sample in samples])
    sized = group_ids is not None and _is_sized(samples[0])
    try:
        return m.Push(
            fields=m.field_headers(samples[0].schema),
            tokens=[sample.tokens for sample in samples],
            loss_tokens=[sample.loss_tokens for sample in samples],
            sample_ids=[
                f"{client_id}/{number}" if sample.sample_id is None else sample.sample_id
                for number, sample in enumerate(samples, first_seq)
            ],
            group_ids=group_ids,
            group_sizes=[_size(sample) for sample in samples] if sized else None,
            policy_versions=_unless_empty([sample.policy_version for sample in samples]),
            staleness_exempt=_unless_false([sample.staleness_exempt for sample in samples]),
            rows=_rows(samples),
            left_out=sum(sample.left_out for sample in samples),
            first_seq=first_seq,
            floor=first_seq,
            named=samples[0].sample_id is not None,
            checksums=[one.checksum for one in samples if one.checksum is not None] or None,
            **_places(samples),
        )
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from error


def payload(samples: Iterable[EncodedSample]) -> list[Buffer]:
    """The spans of samples end to end: large arrays where they are, all else joined."""
    buffers: list[Buffer] = []
    small: list[Any] = []
    for sample in samples:
        for array in sample.arrays:
            nbytes = array.nbytes
            if nbytes < JOINED_BYTES:
                small.append(array)
            else:
                if small:
                    buffers.append(b"".join(small))
                    small.clear()
                buffers.append(array.data.cast("B"))
            if padding := PADDING[nbytes % ALIGNMENT]:
                small.append(padding)
    if small:
        buffers.append(b"".join(small))
    return buffers


def put_of(
    samples: Sequence[EncodedSample], inline_limit: int, handle: int, key: str
) -> Put | None:
    """The object for those of so many bytes and more; None where there are none."""
    large = [sample.nbytes >= inline_limit and sample.reference is None for sample in samples]
    if not any(large):
        return None
    inside = list(compress(samples, large))
    beside = payload(compress(samples, map(not_, large)))
    return Put(handle, key, payload(inside), large, [one.nbytes for one in inside], beside)


def _alike(one: EncodedSample, other: EncodedSample) -> bool:
    """Whether two samples can share a push: the same fields, and the same metadata given."""
    return (
        (one.schema is other.schema or one.schema == other.schema)
        and (one.sample_id is None) == (other.sample_id is None)
        and _is_sized(one) == _is_sized(other)
    )


def _places(samples: Sequence[EncodedSample]) -> dict[str, Any]:
    """Where the samples lie, if it is in payload stores."""
    if samples[0].reference is None:
        return {}
    return m.places_of(sample.reference for sample in samples)


def _rows(samples: Sequence[EncodedSample]) -> dict[str, list[int]] | None:
    """Of each ragged field the rows of each sample; None without any."""
    if not samples[0].rows:
        return None
    each = zip(*(sample.rows for sample in samples), strict=True)
    return dict(zip(samples[0].schema.ragged, map(list, each), strict=True))


def _size(sample: EncodedSample) -> int:
    return 1 if sample.group_size is None else sample.group_size


def _is_sized(sample: EncodedSample) -> bool:
    """Whether the size of its group is known; a sample without a group is one of one."""
    return sample.group_id is None or sample.group_size is not None


def _unless_false(values: list[bool]) -> list[bool] | None:
    return values if any(values) else None


def _unless_empty(values: list[_T | None]) -> list[_T | None] | None:
    return values if any(value is not None for value in values) else None
