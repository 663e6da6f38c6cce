"""What one peer is sent in a turn of the event loop, and what is put off for others' sake."""

import asyncio
from functools import partial

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Outcome
from rollout_dispatcher.service.connections.peer import BULK_BYTES_A_TURN
from tests.service.wires import Wire, make_router

FRAME_BYTES = BULK_BYTES_A_TURN // 2


def frame(number: int) -> bytes:
    answer = m.Pushed(first_seq=number, outcomes=[Outcome.ACCEPTED])
    return codec.encode(answer, FRAME_BYTES) + bytes(FRAME_BYTES)


async def test_bulk_leaves_in_order_and_a_share_of_it_in_each_turn() -> None:
    router = make_router(receive_bytes=2**16)
    wire, written = Wire(router, m.HelloProducer(client_id="p")), list[int]()
    told = len(wire.sent)

    def job(number: int) -> list[bytes]:
        written.append(number)
        return [frame(number)]

    for number in range(5):
        wire.peer.enqueue(partial(job, number))
    assert written == [0, 1]
    for expected in ([0, 1, 2, 3], [0, 1, 2, 3, 4]):
        await asyncio.sleep(0)
        assert written == expected
    assert wire.sent[told:] == b"".join(map(frame, range(5)))
    router.close()


async def test_who_is_put_off_is_not_read_from_and_not_too_slow() -> None:
    router = make_router(receive_bytes=2**16)
    wire = Wire(router, m.HelloProducer(client_id="p"))
    payload = wire.announces_a_push()
    wire.peer.pause_reading()
    assert (wire.reading, wire.peer.held, wire.peer.filled) == (False, True, None)
    wire.peer.resume_reading()
    wire.arrives(payload)
    assert router.receiving.nbytes == 0
    router.close()
