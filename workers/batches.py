"""Cut a list of samples into pushes: each fits in a frame, and its samples have the same traits."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dispatcher.sample import Schema
from workers.encode import EncodedSample

#: One frame's worth of samples: large enough that headers do not matter, small enough that a
#: heartbeat behind it is not late, and that the header stays far below any limit.
BATCH_BYTES = 8 * 1024 * 1024
BATCH_SAMPLES = 256


class Traits(NamedTuple):
    """What the samples of one push have in common: fields, and which metadata they have."""

    schema: Schema
    named: bool
    sized: bool


def traits(sample: EncodedSample) -> Traits:
    """The traits of a sample; one without a group is sized, at one."""
    sized = sample.group_id is None or sample.group_size is not None
    return Traits(sample.schema, sample.sample_id is not None, sized)


def batches(
    samples: Sequence[EncodedSample], max_payload_bytes: int
) -> Iterator[Sequence[EncodedSample]]:
    """Consecutive runs of samples that one push can carry."""
    limit = min(BATCH_BYTES, max_payload_bytes)
    start, nbytes = 0, 0
    for stop, sample in enumerate(samples):
        same = traits(sample) == traits(samples[start])
        full = nbytes + len(sample.span) > limit or stop - start >= BATCH_SAMPLES
        if stop > start and (not same or full):
            yield samples[start:stop]
            start, nbytes = stop, 0
        nbytes += len(sample.span)
    if len(samples) > start:
        yield samples[start:]
