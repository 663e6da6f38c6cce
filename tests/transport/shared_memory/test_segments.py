"""Segments: what is mapped is sealed and whole, and lasts exactly as long as somebody looks."""

import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path

import pytest

from rollout_dispatcher.errors import SegmentRefused
from rollout_dispatcher.protocol.outbox import MAX_BUFFERS
from rollout_dispatcher.transport.shared_memory.segments import (
    DESCRIPTORS_EACH,
    Segment,
    segment_of,
    write_segment,
)
from tests.support.descriptors import are_closed_again, number_open_on, open_descriptors

SIZE = 40_000
BYTES = bytes(range(250)) * (SIZE // 250)


def test_what_was_written_is_read_in_its_spans_without_a_copy() -> None:
    segment = Segment.received(write_segment([BYTES[:7], b"", memoryview(BYTES)[7:]]), SIZE)
    first, second = segment.cut([100, SIZE - 100])
    assert (bytes(first), bytes(second)) == (BYTES[:100], BYTES[100:])
    assert second.readonly
    assert segment_of(second[5:]) is segment
    assert segment.start_of(second) == 100
    assert segment.start_of(second[5:]) is None  # which nobody holds
    assert segment_of(memoryview(b"elsewhere")) is None


def test_a_segment_may_be_of_more_buffers_than_a_system_call_takes() -> None:
    numbers = [bytes([at % 251]) for at in range(2 * MAX_BUFFERS + 1)]
    segment = Segment.received(write_segment(numbers), len(numbers))
    assert bytes(segment) == b"".join(numbers)


def test_a_segment_lasts_until_its_last_span_is_done_with_and_knows_which_are() -> None:
    segment = Segment.received(write_segment([BYTES]), SIZE)
    file = os.fstat(segment.descriptor)
    spans = segment.cut([SIZE // 4] * 4)
    assert segment.live_bytes == SIZE
    kept = spans[2][8:]
    del spans[0:2]
    assert segment.live_bytes == SIZE // 2
    del spans
    assert segment.live_bytes == 0
    del segment
    assert number_open_on(file) == DESCRIPTORS_EACH
    assert kept[0] == BYTES[SIZE // 2 + 8]
    del kept
    assert number_open_on(file) == 0


def mapped_bytes(segment: Segment) -> int:
    """Of its memory, what this process has looked at through the mapping."""
    inode = str(os.fstat(segment.descriptor).st_ino)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    own = dropwhile(lambda line: inode not in line.split()[4:5], lines)
    return next(int(line.split()[1]) * 1024 for line in own if line.startswith("Rss:"))


def test_a_span_is_copied_without_a_page_of_it_being_mapped() -> None:
    segment = Segment.received(write_segment([BYTES]), SIZE)
    first, none, second = segment.cut([100, 0, SIZE - 100])
    copies = list(map(segment.copied, (first, none, second)))
    assert mapped_bytes(segment) == 0
    assert list(map(bytes, copies)) == [BYTES[:100], b"", BYTES[100:]]
    assert list(map(segment_of, copies)) == [None] * 3
    assert bytes(segment.copied(second[5:])) == BYTES[105:]  # which is no span


def test_nobody_can_change_what_was_sealed() -> None:
    descriptor = write_segment([BYTES])
    try:
        for change in (
            lambda: os.pwrite(descriptor, b"x", 0),
            lambda: os.ftruncate(descriptor, 1),
            lambda: os.ftruncate(descriptor, 2 * SIZE),
            lambda: mmap.mmap(descriptor, SIZE),
            lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0),
        ):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(descriptor)


def memfd(nbytes: int, seals: int, *, holes: bool = False) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    if not holes:
        os.pwrite(descriptor, bytes(nbytes), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


#: Writable mappings of before stay writable; Python 3.11 does not know its name.
FUTURE_WRITE = 0x10
ALL = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def a_pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def unreadable() -> int:
    whole = memfd(SIZE, ALL)
    try:
        return os.open(f"/proc/self/fd/{whole}", os.O_PATH)
    finally:
        os.close(whole)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (a_pipe, "no shared memory"),
        (a_file, "no shared memory"),
        (unreadable, "no shared memory"),
        (lambda: memfd(SIZE, 0), "not sealed"),
        *((lambda left=left: memfd(SIZE, ALL & ~left), "not sealed") for left in (1, 2, 4, 8)),
        (lambda: memfd(SIZE, ALL & ~8 | FUTURE_WRITE), "not sealed"),
        (lambda: memfd(SIZE - 1, ALL), f"{SIZE - 1} bytes"),
        (lambda: memfd(SIZE + 1, ALL), f"{SIZE + 1} bytes"),
        (lambda: memfd(SIZE, ALL, holes=True), "holes"),
    ],
)
def test_nothing_else_is_mapped_and_its_descriptor_is_closed(
    make: Callable[[], int], why: str
) -> None:
    before = open_descriptors()
    with pytest.raises(SegmentRefused, match=why):
        Segment.received(make(), SIZE)
    assert are_closed_again(before)
