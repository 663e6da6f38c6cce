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
