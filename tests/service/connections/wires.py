"""A real router and real connections whose transports are memory."""

import asyncio
from collections.abc import Iterable

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.connections.peer import Peer, PeerLimits
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.router import Router
from tests.support.client import make_push

LIMITS = PeerLimits(FrameLimits(1 << 20, 1 << 20), 10.0, 10.0)
#: Samples whose push is large, and found no room while another is received.
TOKENS = [10_000]


class Wire(asyncio.Transport):
    """A connection without a socket: knows whether it is read from, and what it was sent."""

    def __init__(self, router: Router, name: str, *, feedback: bool = False) -> None:
        super().__init__()
        self.reading, self.lost, self.sent = True, False, b""
        self.peer = Peer(router, LIMITS, router.clock)
        self.peer.connection_made(self)
        hello = m.HelloProducer(client_id=name, feedback=feedback)
        self.arrives(codec.encode(hello))

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
        dp_size=2, global_batch_size=4, micro_batch_tokens=2**20, receive_bytes=2**16
    )
    clock = asyncio.get_running_loop().time
    core = DispatcherCore(core_config(config))
    return Router(config, core, Metrics(config, core, clock), clock)
