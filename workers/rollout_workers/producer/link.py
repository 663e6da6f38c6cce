"""One connection of a producer: frames in, frames out, heartbeats.

An asyncio protocol, driven by callbacks: what the core has to say is written as long as the
transport has room, so that a slow dispatcher holds pushes in the core rather than in a buffer.
"""

import asyncio
from collections.abc import Callable, Sequence

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.protocol.sessions import LEAVING, Session, Side
from rollout_dispatcher.transport.plain import StreamProtocol, StreamTransport
from rollout_workers.client.liveness import Heartbeat, refusal
from rollout_workers.producer.core import ProducerCore, Settled

#: The dispatcher sends a producer outcomes only: one short word a sample, or an error message.
LIMITS = FrameLimits(header=16 * 1024 * 1024, payload=0)


class ProducerLink(StreamProtocol):
    """Speaks for a `ProducerCore` on one transport.

    welcomed: resolves to the heartbeat interval in seconds. lost: resolves when the connection
    has ended. Both are told why by an exception.
    """

    def __init__(self, core: ProducerCore, settle: Callable[[Settled], None]) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._core = core
        self._settle = settle
        self._session = Session(Side.PRODUCER, LIMITS)
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._heartbeat: Heartbeat | None = None
        self._written = 0  # bytes
        self._retry: asyncio.TimerHandle | None = None
        self.welcomed: asyncio.Future[float] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()

    async def watch(self, interval_s: float) -> None:
        """Ping when due, until the connection ends; raises what ended it."""
        self._heartbeat = heartbeat = Heartbeat(interval_s, self._loop.time())
        left = 0
        while not self.lost.done():
            now = self._loop.time()
            if not self._is_leaving and heartbeat.ping_due(now):
                self._write(self._core.ping())
            await asyncio.wait([self.lost], timeout=heartbeat.wait(now))
            before, left = left, self._left()
            if self._unsent and left > before:
                heartbeat.heard()  # it reads, and answers what it has not come to when it has
            heartbeat.check(self._loop.time())
        await self.lost

    def pump(self) -> None:
        """Write what the core has to say while there is room."""
        if not self._writable():
            return
        now = self._loop.time()
        for message, payload in self._core.outgoing(now):
            self._write(message, payload)
            if not self._writable():
                return
        wait = self._core.wait(now)
        if wait is not None and self._retry is None:
            self._retry = self._loop.call_later(wait, self._pump_again)

    @property
    def _unsent(self) -> int:
        """Bytes that were written and that the kernel has no room for yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _left(self) -> int:
        """Bytes that have left; while some are unsent, those that the dispatcher has read."""
        return self._written - self._unsent

    def _writable(self) -> bool:
        return not (self._paused or self._is_leaving or self.lost.done())

    @property
    def _is_leaving(self) -> bool:
        return self._session.state in LEAVING

    def _pump_again(self) -> None:
        self._retry = None
        self.pump()

    def say_goodbye(self) -> None:
        """Tell the dispatcher that this is deliberate; it closes the connection then."""
        if not self._is_leaving and not self.lost.done():
            self._write(m.Bye())

    def copy_unsent(self) -> None:
        """From now on the buffers that are on their way may change."""
        if isinstance(self._transport, StreamTransport):
            self._transport.copy_unsent()

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, message: m.Message, payload: Sequence[Buffer] = ()) -> None:
        assert self._transport is not None
        frame = [self._session.say(message, sum(map(len, payload))), *payload]
        self._written += sum(map(len, frame))
        if isinstance(self._transport, StreamTransport):
            self._transport.writelines(frame)
        else:  # TLS makes a record, and keeps a reference, of whatever it is given
            self._transport.write(b"".join(frame))

    def _accept(self, message: m.Message) -> None:
        if isinstance(message, m.Error):
            raise refusal(message)
        if isinstance(message, m.WelcomeProducer):
            self._core.connected(message)
            self.welcomed.set_result(message.heartbeat_interval_s)
        elif not isinstance(message, m.Bye):
            for settled in self._core.handle(message, self._loop.time()):
                self._settle(settled)

    def _end(self, error: Exception) -> None:
        for future in (self.welcomed, self.lost):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: it is raised by whoever awaits, if anyone still does
        if self._retry is not None:
            self._retry.cancel()
        self.abort()

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce the producer."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._write(self._core.hello())

    def get_buffers(self) -> list[memoryview]:
        """Memory that the next bytes belong into."""
        return self._session.get_buffers()

    def buffer_updated(self, nbytes: int) -> None:
        """Take the frames that are now complete."""
        if self._heartbeat is not None:
            self._heartbeat.heard()
        try:
            for message, _ in self._session.received(nbytes):
                self._accept(message)
        except Exception as error:
            self._end(error)
            return
        if self._heartbeat is not None:  # before that nobody would know of what is on its way
            self.pump()

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._paused = True

    def resume_writing(self) -> None:
        """There is room again."""
        self._paused = False
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is over."""
        self._end(error or ConnectionError("the dispatcher closed the connection"))
