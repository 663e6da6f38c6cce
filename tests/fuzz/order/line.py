"""A connection in memory: the dispatcher's own `Peer` at one end, whoever speaks at the other.

Time is virtual: the loop's clock moves when it is told to, and never waits.
"""

import asyncio
from collections.abc import Callable, Iterable

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import FrameLimits, FrameReader
from rollout_dispatcher.service.connections.peer import Peer, PeerLimits
from rollout_dispatcher.service.router import Router
from tests.support.wire.frames import feed

#: Callbacks that lead to others settle within so many turns of the event loop.
TURNS = 12
LIMITS = PeerLimits(FrameLimits(1 << 20, 1 << 20), handshake_timeout=10.0, write_timeout=30.0)

Hear = Callable[["Line", m.Message, memoryview], None]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until it is moved."""

    now = 1000.0

    def __init__(self) -> None:
        super().__init__()
        self.set_debug(False)  # its checks are of real time, and take most of it

    def time(self) -> float:
        """What its timers go by."""
        return self.now


async def settle() -> None:
    """Let everything happen that waits for no time to pass."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Line(asyncio.Transport):
    """The transport under a `Peer`, and the far end of it; `hear` gets what the peer writes.

    hello: what was said first, if it was a hello. open: whether anything that is said is read.
    """

    def __init__(self, router: Router, clock: Callable[[], float], hear: Hear) -> None:
        super().__init__()
        self._hear = hear
        self._reader = FrameReader(FrameLimits(1 << 24, 1 << 24))
        self._unread = bytearray()
        self._reads, self._closing, self._lost = True, False, False
        self.hello: m.Message | None = None
        self.generation: int | None = None
        self.failed: m.Error | None = None
        self._peer = Peer(router, LIMITS, clock)
        self._peer.connection_made(self)

    @property
    def open(self) -> bool:
        """Whether somebody is at the other end."""
        return not (self._closing or self._lost)

    # -- the far end

    def say(self, message: m.Message, payload: bytes = b"") -> None:
        """Send a message."""
        self._unread += codec.encode(message, len(payload)) + payload
        self._feed()

    def cut(self) -> None:
        """The connection is reset."""
        if not self._lost:
            self._lost = True
            self._peer.connection_lost(ConnectionResetError())

    def stop_reading(self) -> None:
        """Let what the dispatcher writes pile up."""
        if self.open:
            self._peer.pause_writing()

    def read_on(self) -> None:
        """Take it all."""
        if self.open:
            self._peer.resume_writing()

    def _feed(self) -> None:
        while self._unread and self._reads and self.open:
            target = self._peer.get_buffers()[0]
            taken = min(len(target), len(self._unread))
            target[:taken] = self._unread[:taken]
            del self._unread[:taken]
            self._peer.buffer_updated(taken)

    # -- the transport, as the peer sees it

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """What the peer writes is heard at once."""
        if self._lost:
            return
        for frame in feed(self._reader, bytes(data)):
            message = codec.decode(frame)
            if isinstance(message, m.Error):
                self.failed = message
            self._hear(self, message, frame.payload)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """The same of several buffers."""
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        """Nothing is left in it."""
        return 0

    def can_write_eof(self) -> bool:
        """As a socket can."""
        return True

    def write_eof(self) -> None:
        """The far end hangs up when it hears of the end."""
        self.close()

    def pause_reading(self) -> None:
        """Leave what is said where it is."""
        self._reads = False

    def resume_reading(self) -> None:
        """Read again."""
        self._reads = True
        asyncio.get_running_loop().call_soon(self._feed)

    def is_closing(self) -> bool:
        """Whether it is over."""
        return not self.open

    def close(self) -> None:
        """End it, in a turn of its own."""
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._end)

    def abort(self) -> None:
        """The same."""
        self.close()

    def _end(self) -> None:
        if not self._lost:
            self._lost = True
            self._peer.connection_lost(None)
