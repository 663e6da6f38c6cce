"""Cut a list of samples into pushes: each fits in a frame, and its samples have the same traits."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dispatcher.sample import ALIGNMENT
from dispatcher.wire.outbox import Buffer
from workers.encode import EncodedSample

#: One frame's worth of samples: large enough that headers do not matter, small enough that a
#: heartbeat behind it is not late, and that the header stays far below any limit.
BATCH_BYTES = 8 * 1024 * 1024
BATCH_SAMPLES = 256
#: Arrays below this size are joined: to copy them is cheaper than to list them.
JOINED_BYTES = 8 * 1024
#: Zeros after an array, by how many it takes to the next one's start.
_ZEROS = [bytes(size) for size in range(ALIGNMENT)]


def is_sized(sample: EncodedSample) -> bool:
    """Whether the size of its group is known; a sample without a group is one of one."""
    return sample.group_id is None or sample.group_size is not None


def batches(
    samples: Sequence[EncodedSample], max_payload_bytes: int
) -> Iterator[Sequence[EncodedSample]]:
    """Consecutive runs of samples that one push can carry."""
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
            if gap := -nbytes % ALIGNMENT:
                small.append(_ZEROS[gap])
    if small:
        buffers.append(b"".join(small))
    return buffers


def _alike(one: EncodedSample, other: EncodedSample) -> bool:
    """Whether two samples can share a push: the same fields, and the same metadata given."""
    return (
        (one.schema is other.schema or one.schema == other.schema)
        and (one.sample_id is None) == (other.sample_id is None)
        and is_sized(one) == is_sized(other)
    )
