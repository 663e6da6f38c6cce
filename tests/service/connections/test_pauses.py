"""The reasons for which a producer is not read from do not get in each other's way.

A real router and a real connection whose transport is memory.
"""

import asyncio
from collections.abc import Iterable

from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.service.config.core import core_config
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.connections.peer import Peer, PeerLimits
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.router import Router
from tests.support.client import make_push

LIMITS = PeerLimits(FrameLimits(1 << 20, 1 << 20), 10.0, 10.0)
#: Samples whose push is large, and found no room while another is received.
TOKENS = [10_000]


class Wire(asyncio.Transport):
    """A connection without a socket: knows whether it is read from, and what it was sent."""

    def __init__(self, router: Router, name: str) -> None:
        super().__init__()
        self.reading, self.lost, self.sent = True, False, b""
        self.peer = Peer(router, LIMITS, router.clock)
        self.peer.connection_made(self)
        self.arrives(codec.encode(m.HelloProducer(client_id=name)))

    def arrives(self, data: bytes) -> None:
        """Bytes from the client: as many as are read."""
        while data and self.reading:
            target = self.peer.get_buffer(-1)
            taken = min(len(target), len(data))
            target[:taken], data = data[:taken], data[taken:]
            self.peer.buffer_updated(taken)
        assert not data, "more than is read"

    def announces_a_push(self) -> bytes:
        """A push begins; returns its payload."""
        push, payload = make_push("p", 0, TOKENS)
        self.arrives(codec.encode(push, len(payload)))
        return payload

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.sent += b"".join(list_of_data)

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.lost

    def close(self) -> None:
        self.lost = True

    def abort(self) -> None:
        self.lost = True
        self.peer.connection_lost(None)


def make_hub() -> Router:
    """A router with room for one large frame; nobody trains, and nothing is due by itself."""
    config = ServeConfig(
        dp_size=2, dispatch_batch_size=4, micro_batch_tokens=2**20, receive_bytes=2**16
    )
    clock = asyncio.get_running_loop().time
    core = Dispatch(core_config(config))
    return Router(config, core, Metrics(config, core, clock), clock)


def holder_and_waiting(router: Router) -> tuple[Wire, Wire, bytes]:
    holder, waiting = Wire(router, "holder"), Wire(router, "waiting")
    payload = holder.announces_a_push()
    waiting.announces_a_push()
    assert (holder.reading, waiting.reading) == (True, False)
    return holder, waiting, payload


async def test_who_waits_is_read_from_once_it_is_let_in_and_nothing_else_holds_it() -> None:
    router = make_hub()
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


async def test_other_reasons_that_pass_do_not_let_it_in() -> None:
    router = make_hub()
    holder, waiting, payload = holder_and_waiting(router)
    waiting.peer.hold()
    waiting.peer.go_on()
    waiting.peer.pause_writing()
    waiting.peer.resume_writing()
    assert not waiting.reading
    holder.abort()
    await asyncio.sleep(0)
    waiting.arrives(payload)
    assert router.receiving.nbytes == 0
    router.close()


async def test_who_is_lost_after_it_was_let_in_gives_its_room_back() -> None:
    router = make_hub()
    holder, waiting, payload = holder_and_waiting(router)
    third = Wire(router, "third")
    third.announces_a_push()
    holder.arrives(payload)  # lets the second in, a turn later
    waiting.abort()
    await asyncio.sleep(0)
    assert third.reading
    third.arrives(payload)
    assert router.receiving.nbytes == 0
    router.close()


async def test_what_is_read_no_more_costs_no_memory_and_is_read_to_its_end() -> None:
    router = make_hub()
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
        wire.abort()
    router.close()


async def test_a_frame_that_we_do_not_read_is_not_too_slow() -> None:
    router = make_hub()
    holder, _, _ = holder_and_waiting(router)
    patience = router.receiving.patience
    holder.peer.hold()
    assert [router.receiving.too_slow(at * patience) for at in range(3)] == [[], [], []]
    holder.peer.go_on()
    holder.peer.pause_writing()  # that it does not read is its own affair
    assert [router.receiving.too_slow(at * patience) for at in (3, 4)] == [[], [holder.peer]]
    router.close()


async def test_who_is_not_read_from_is_not_silent() -> None:
    router = make_hub()
    holder, waiting, _ = holder_and_waiting(router)
    holder.peer.pause_writing()
    for wire in (holder, waiting):
        wire.peer.last_heard -= 10_000
    router.close_silent(0.0)
    assert not holder.is_closing()
    assert not waiting.is_closing()
    holder.peer.resume_writing()
    holder.peer.last_heard -= 10_000
    router.close_silent(0.0)
    assert holder.is_closing()
    router.close()
