"""The reasons for which a producer is not read from do not get in each other's way."""

import asyncio

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.router import Router
from tests.service.wires import Wire, make_router


def holder_and_waiting(router: Router) -> tuple[Wire, Wire, bytes]:
    holder, waiting = (
        Wire(router, m.HelloProducer(client_id="holder")),
        Wire(router, m.HelloProducer(client_id="waiting")),
    )
    payload = holder.announces_a_push()
    waiting.announces_a_push()
    assert (holder.reading, waiting.reading) == (True, False)
    return holder, waiting, payload


async def test_who_waits_is_read_from_once_it_is_let_in_and_nothing_else_holds_it() -> None:
    router = make_router(receive_bytes=2**16)
    holder, waiting, payload = holder_and_waiting(router)
    waiting.peer.hold()
    waiting.peer.pause_writing()
    holder.arrives(payload)
    await asyncio.sleep(0)
    assert (waiting.reading, waiting.peer.held) == (False, True)
    waiting.peer.go_on()
    assert not waiting.reading
    waiting.peer.resume_writing()
    assert (waiting.reading, waiting.peer.held) == (True, False)
    waiting.arrives(payload)
    assert router.receiving.nbytes == 0
    router.close()


async def test_who_is_lost_after_it_was_let_in_gives_its_room_back() -> None:
    router = make_router(receive_bytes=2**16)
    holder, waiting, payload = holder_and_waiting(router)
    third = Wire(router, m.HelloProducer(client_id="third"))
    third.announces_a_push()
    holder.arrives(payload)  # lets the second in, a turn later
    waiting.lose()
    await asyncio.sleep(0)
    assert third.reading
    third.arrives(payload)
    assert router.receiving.nbytes == 0
    router.close()


async def test_what_is_read_no_more_costs_no_memory_and_is_read_to_its_end() -> None:
    router = make_router(receive_bytes=2**16)
    holder, waiting, payload = holder_and_waiting(router)
    holder.arrives(payload[:1000])
    router.stop("the test is over")
    assert holder.peer.filled == 0
    assert (router.receiving.nbytes, len(router.receiving.waiting)) == (0, 0)
    for wire in (holder, waiting):
        assert wire.reading, "closing before it was read to its end could lose the last words"
        wire.arrives(payload)
        assert b"the test is over" in wire.sent
    assert router.receiving.nbytes == 0
    for wire in (holder, waiting):
        wire.lose()
    router.close()


async def test_a_frame_that_we_do_not_read_is_not_too_slow() -> None:
    router = make_router(receive_bytes=2**16)
    holder, _, _ = holder_and_waiting(router)
    patience = router.receiving.patience
    holder.peer.hold()
    assert [router.receiving.too_slow(at * patience) for at in range(3)] == [[], [], []]
    holder.peer.go_on()
    holder.peer.pause_writing()  # that it does not read is its own affair
    assert [router.receiving.too_slow(at * patience) for at in (3, 4)] == [[], [holder.peer]]
    router.close()


async def test_who_is_not_read_from_is_not_silent() -> None:
    router = make_router(receive_bytes=2**16)
    holder, waiting, _ = holder_and_waiting(router)
    holder.peer.pause_writing()
    for wire in (holder, waiting):
        wire.peer.last_received -= 10_000
    router.close_silent(0.0)
    assert not holder.is_closing()
    assert not waiting.is_closing()
    holder.peer.resume_writing()
    holder.peer.last_received -= 10_000
    router.close_silent(0.0)
    assert holder.is_closing()
    router.close()
