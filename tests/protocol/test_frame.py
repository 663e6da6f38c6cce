"""Frames: the stream may be cut anywhere, sizes are checked first, and garbage is an error."""

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import FrameTooLarge, ProtocolError
from rollout_dispatcher.protocol.frame import (
    HANDSHAKE_LIMITS,
    MAGIC,
    PREFIX,
    STAGING_BYTES,
    Frame,
    FrameLimits,
    FrameReader,
    encode_frame,
)
from tests.support.wire.frames import feed

LIMITS = FrameLimits(header=1 << 20, payload=1 << 20)

Parts = tuple[int, bytes, bytes]
parts = st.tuples(st.integers(0, 255), st.binary(max_size=100), st.binary(max_size=2000))


def stream_of(frames: list[Parts]) -> bytes:
    return b"".join(encode_frame(kind, head, len(body)) + body for kind, head, body in frames)


def plain(frames: list[Frame]) -> list[Parts]:
    """Frames as they went in: the header without the spaces that pad it."""
    return [(frame.type, bytes(frame.header), bytes(frame.payload)) for frame in frames]


def padded(frames: list[Parts]) -> list[Parts]:
    return [(kind, head + b" " * (-len(head) % 8), body) for kind, head, body in frames]


@given(frames=st.lists(parts, max_size=6), data=st.data())
def test_any_split_of_the_stream_gives_the_same_frames(
    frames: list[Parts], data: st.DataObject
) -> None:
    stream = stream_of(frames)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10).map(sorted))
    reader = FrameReader(LIMITS)
    found: list[Frame] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += feed(reader, stream[start:stop])
    assert plain(found) == padded(frames)


def test_a_frame_may_be_larger_than_the_staging_area() -> None:
    frames = [(7, b"{}", bytes(5 * STAGING_BYTES)), (8, b"{}", b"next")]
    assert plain(feed(FrameReader(LIMITS), stream_of(frames))) == padded(frames)


def test_header_and_payload_start_at_multiples_of_eight_bytes() -> None:
    for size in range(20):
        assert len(encode_frame(1, b"x" * size)) % 8 == 0


def test_frames_do_not_share_memory() -> None:
    reader = FrameReader(LIMITS)
    first, second = feed(reader, stream_of([(1, b"{}", b"first"), (1, b"{}", b"second")]))
    first.payload[:] = b"xxxxx"
    assert bytes(second.payload) == b"second"


@pytest.mark.parametrize(
    ("header", "payload", "part"),
    [(2**32 - 8, 0, "header"), (0, 2**64 - 1, "payload"), (8, 2**40, "payload")],
)
def test_a_size_beyond_the_limit_is_refused_before_anything_is_allocated(
    header: int, payload: int, part: str
) -> None:
    # Memory of these sizes does not exist: an attempt to allocate it would be another error.
    prefix = PREFIX.pack(MAGIC, 1, 0, header, payload)
    with pytest.raises(FrameTooLarge, match=f"frame {part} of {max(header, payload)} bytes"):
        feed(FrameReader(LIMITS), prefix)


def test_the_error_of_a_large_frame_has_size_and_limit() -> None:
    with pytest.raises(FrameTooLarge) as raised:
        feed(FrameReader(FrameLimits(64, 100)), stream_of([(1, b"", b"z" * 101)]))
    assert (raised.value.size, raised.value.limit) == (101, 100)
    assert str(raised.value) == "frame payload of 101 bytes exceeds the limit of 100 bytes"


def test_limits_may_change_between_two_frames_of_one_read() -> None:
    stream = stream_of([(1, b"{}", b""), (2, b"{}", b"x" * 1000)])
    reader = FrameReader(HANDSHAKE_LIMITS)
    target = reader.get_buffer()
    target[: len(stream)] = stream
    found = reader.received(len(stream))
    assert next(found).type == 1
    reader.limits = LIMITS
    assert bytes(next(found).payload) == b"x" * 1000
    assert next(found, None) is None


@pytest.mark.parametrize("data", [b"G", b"GET / HTTP/1.1\r\n", b"RX", b"\x00", b"\x16\x03\x01"])
def test_what_is_no_frame_is_refused_at_its_first_bytes(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="HTTP is served on another"):
        feed(FrameReader(LIMITS), data)


@pytest.mark.parametrize(("reserved", "header"), [(1, 0), (0, 4), (255, 8)])
def test_a_malformed_prefix_is_refused(reserved: int, header: int) -> None:
    with pytest.raises(ProtocolError, match="malformed frame prefix"):
        feed(FrameReader(LIMITS), PREFIX.pack(MAGIC, 1, reserved, header, 0))


def in_thirds(kind: int, header: memoryview, size: int) -> list[memoryview]:
    sizes = [size // 3, 0, size // 3, size - 2 * (size // 3)]
    return [memoryview(bytearray(part)) for part in sizes]


@given(frames=st.lists(parts, min_size=1, max_size=4), chunk=st.integers(1, 3000))
def test_a_payload_in_pieces_is_filled_in_order_however_much_arrives_at_once(
    frames: list[Parts], chunk: int
) -> None:
    reader, stream = FrameReader(LIMITS), stream_of(frames)
    found: list[Frame] = []
    while stream:
        taken = 0
        for target in reader.get_buffers():
            assert len(target) > 0
            piece = stream[taken : min(chunk, taken + len(target))]
            target[: len(piece)] = piece
            taken += len(piece)
        stream = stream[taken:]
        found += reader.received(taken, in_thirds)
    told = [(frame.type, bytes(frame.header), b"".join(frame.parts)) for frame in found]
    assert told == padded(frames)


def test_a_large_payload_is_received_into_its_own_memory() -> None:
    own: list[memoryview] = []

    def allocate(kind: int, header: memoryview, size: int) -> list[memoryview]:
        own.extend(memoryview(bytearray(size // 4)) for _ in range(4))
        return own

    reader = FrameReader(LIMITS)
    assert feed(reader, encode_frame(1, b"{}", 1 << 20), allocate) == []
    assert [target.obj for target in reader.get_buffers()[:4]] == [part.obj for part in own]


def refuse(nbytes: int) -> bool:
    return False


@given(frames=st.lists(parts, max_size=6), data=st.data())
def test_a_reader_that_has_to_wait_for_room_finds_the_same_frames(
    frames: list[Parts], data: st.DataObject
) -> None:
    stream, asked = stream_of(frames), list[int]()
    reader = FrameReader(LIMITS)

    def admit(nbytes: int) -> bool:
        asked.append(nbytes)
        return data.draw(st.booleans())

    sizes = [len(body) for _, _, body in frames]
    found: list[Frame] = []
    while stream:
        target = reader.get_buffer()
        taken = data.draw(st.integers(1, min(len(target), len(stream))))
        target[:taken], stream = stream[:taken], stream[taken:]
        found += reader.received(taken, admit=admit)
        while reader.waits_for and (not stream or data.draw(st.booleans())):
            assert reader.waits_for == asked[-1]
            found += reader.go_on(admit=admit)
    assert plain(found) == padded(frames)
    unasked = iter(sizes)
    assert all(size in unasked for size in asked), "asked once for a frame, and for all of it"


def test_nothing_is_allocated_for_a_frame_that_waits_for_room() -> None:
    # Memory of this size does not exist: an attempt to allocate it would be an error.
    reader = FrameReader(FrameLimits(header=1 << 20, payload=1 << 62))
    assert feed(reader, encode_frame(1, b"{}", 1 << 61), admit=refuse) == []
    assert reader.waits_for == 1 << 61


def test_a_large_header_waits_for_room_like_a_payload_and_a_small_one_never() -> None:
    reader = FrameReader(FrameLimits(header=1 << 62, payload=0))
    assert len(feed(reader, encode_frame(1, b"x" * STAGING_BYTES), admit=refuse)) == 1
    assert feed(reader, PREFIX.pack(MAGIC, 1, 0, STAGING_BYTES + 8, 0), admit=refuse) == []
    assert reader.waits_for == STAGING_BYTES + 8


def test_frames_before_the_one_that_waits_are_shown_and_those_behind_it_follow() -> None:
    frames = [(1, b"{}", b"here"), (2, b"{}", b"payload!"), (3, b"{}", b"")]
    reader, stream = FrameReader(LIMITS), stream_of(frames)
    begun = len(stream_of(frames[:1])) + PREFIX.size
    assert plain(feed(reader, stream[:begun], admit=refuse)) == padded(frames[:1])
    assert feed(reader, stream[begun:], admit=refuse) == []
    assert plain(list(reader.go_on())) == padded(frames[1:])
    assert reader.waits_for == 0


def test_a_size_beyond_the_limit_is_refused_before_anybody_is_asked_for_room() -> None:
    def admit(nbytes: int) -> bool:
        raise AssertionError("asked")

    with pytest.raises(FrameTooLarge):
        feed(FrameReader(LIMITS), encode_frame(1, b"", LIMITS.payload + 1), admit=admit)


def test_a_frame_that_is_here_already_asks_for_no_room() -> None:
    stream = stream_of([(1, b"{}", b"payload")])
    assert len(feed(FrameReader(LIMITS), stream, admit=refuse)) == 1
    for cut in range(PREFIX.size, len(stream)):
        reader = FrameReader(LIMITS)
        assert (feed(reader, stream[:cut], admit=refuse), reader.waits_for) == ([], 7)


def test_a_reader_keeps_nothing_of_a_frame_that_it_has_shown() -> None:
    own = [np.zeros(1 << 20, np.uint8)]
    alive = weakref.ref(own[0])
    reader = FrameReader(LIMITS)
    frame = encode_frame(1, b"{}", 1 << 20) + bytes(1 << 20)
    assert len(feed(reader, frame, lambda *_: [own.pop().data])) == 1
    assert alive() is None


def test_a_reader_knows_how_much_of_a_frame_has_arrived_and_forgets_it_when_told() -> None:
    own = [np.zeros(1 << 20, np.uint8)]
    alive = weakref.ref(own[0])
    reader = FrameReader(LIMITS)
    assert reader.filled == 0
    frame = encode_frame(1, b"{}", 1 << 20)
    feed(reader, frame[:-4])
    assert reader.filled == 4
    feed(reader, frame[-4:] + bytes(5000), lambda *_: [own.pop().data])
    assert reader.filled == 8 + 5000
    assert alive() is not None
    reader.drop()
    assert (alive(), reader.filled) == (None, 0)
