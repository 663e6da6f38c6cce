"""The outbox: whatever the writes cut, the bytes that leave are the bytes that were put."""

from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.protocol.outbox import MAX_BUFFERS, Outbox

chunks = st.lists(st.lists(st.binary(max_size=9), max_size=4), max_size=8)


@given(chunks=chunks, data=st.data())
def test_any_partial_writes_give_the_same_stream(
    chunks: list[list[bytes]], data: st.DataObject
) -> None:
    outbox, left = Outbox(), bytearray()
    for buffers in chunks:
        outbox.put(buffers)
        offered = b"".join(outbox.head())
        taken = data.draw(st.integers(0, len(offered)))
        left += offered[:taken]
        outbox.sent(taken)
    left += b"".join(outbox.head())
    assert bytes(left) == b"".join(part for buffers in chunks for part in buffers)


@given(chunks=chunks)
def test_it_knows_how_much_waits(chunks: list[list[bytes]]) -> None:
    outbox = Outbox()
    for buffers in chunks:
        outbox.put(buffers)
        assert outbox.nbytes == len(b"".join(outbox.head()))
        outbox.sent(min(3, outbox.nbytes))
    outbox.clear()
    assert (outbox.nbytes, outbox.head()) == (0, [])


def test_it_offers_no_more_buffers_than_one_system_call_takes() -> None:
    outbox = Outbox()
    outbox.put([b"x"] * (MAX_BUFFERS + 5))
    assert len(outbox.head()) == MAX_BUFFERS
    outbox.sent(MAX_BUFFERS)
    assert len(outbox.head()) == 5


def test_after_a_copy_what_was_put_may_change() -> None:
    outbox, payload = Outbox(), bytearray(b"payload")
    outbox.put([payload, memoryview(payload)[2:]])
    outbox.sent(3)
    outbox.copy()
    payload[:] = bytes(len(payload))
    assert b"".join(outbox.head()) == b"load" + b"yload"
    outbox.sent(9)
    assert (outbox.nbytes, outbox.head()) == (0, [])


def test_nothing_is_copied() -> None:
    outbox, payload = Outbox(), bytearray(b"payload")
    outbox.put([payload])
    outbox.sent(3)
    (rest,) = outbox.head()
    assert isinstance(rest, memoryview)
    assert rest.obj is payload


@given(
    chunks=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=8),
    data=st.data(),
)
def test_descriptors_leave_with_the_first_byte_that_they_were_put_with(
    chunks: list[tuple[int, int]], data: st.DataObject
) -> None:
    outbox, put, went, gone = Outbox(), [], [], 0
    for size, count in chunks:
        if count:
            put.append((gone + outbox.nbytes, list(range(count))))
        outbox.put([bytes(size)], list(range(count)))
        while outbox.nbytes and data.draw(st.booleans()):
            offered = sum(map(len, outbox.head()))
            assert not any(gone < start < gone + offered for start, _ in put)
            with_them = outbox.descriptors
            taken = data.draw(st.integers(0, offered))
            sent = outbox.sent(taken)
            assert list(sent) == (list(with_them) if taken else [])
            if sent:
                went.append((gone, list(sent)))
            gone += taken
    assert outbox.num_descriptors == sum(len(lot) for _, lot in put[len(went) :])
    assert went == put[: len(went)]
    assert outbox.clear() == [one for _, lot in put[len(went) :] for one in lot]


def test_descriptors_that_wait_go_together_as_far_as_they_may() -> None:
    outbox = Outbox()
    outbox.together = 3
    for name in range(5):
        outbox.put([b"ab"], [name])
    assert outbox.descriptors == [0, 1, 2]
    assert outbox.sent(sum(map(len, outbox.head()))) == [0, 1, 2]
    assert outbox.sent(1) == [3, 4]
    outbox.put([b"c"], [5])
    assert not outbox.descriptors  # the byte before it has begun
    assert not outbox.sent(3)
    assert outbox.sent(1) == [5]
