"""One connection of a client: frames in, frames out, heartbeats, and a goodbye.

An asyncio protocol, driven by callbacks. The core's messages are written as long as the transport
has room, so a slow dispatcher holds pushes in the core rather than in a buffer, and payloads are
received straight into the role's memory. A failure of the connection is an OSError; one of the
bytes, a ProtocolError.
"""

import asyncio
from collections.abc import Iterator, Sequence

from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.protocol.sessions import Session, SessionState
from rollout_dispatcher.transport.plain import StreamProtocol, StreamTransport
from rollout_workers.client.role import CLOSE_TIMEOUT_S, Heartbeat, Role


def error_message(error: BaseException) -> m.Error:
    """The message of an error; an error of others has its type's name in it."""
    if isinstance(error, DispatcherError):
        return m.Error(code=error.code, message=str(error), retriable=error.retriable)
    text = f"{type(error).__name__}: {error}"
    return m.Error(code=DispatcherError.code, message=text)


def restored(message: m.Error) -> DispatcherError:
    """The error of a message."""
    # Of a class and others made of it that have its code, the class itself: it comes first.
    kinds = (kind for kind in _kinds(DispatcherError) if kind.code == message.code)
    kind = next(kinds, DispatcherError)
    # Not by its own constructor, which makes the text from facts that are not here.
    error = kind.__new__(kind, message.message)
    Exception.__init__(error, message.message)
    return error


def _kinds(kind: type[DispatcherError]) -> Iterator[type[DispatcherError]]:
    yield kind
    for special in kind.__subclasses__():
        yield from _kinds(special)


def refusal(message: m.Error) -> Exception:
    """The exception for an Error frame: a ConnectionError when trying again may help."""
    if message.retriable:
        return ConnectionError(f"the dispatcher closed the connection: {message.message}")
    return restored(message)


#: Messages that a link handles beside its core; all others are the core's alone.
OF_CONNECTIONS = frozenset({m.Error, m.Bye, m.WelcomeProducer, m.WelcomeRank})
#: The payload of a message without one.
NO_PAYLOAD = memoryview(b"")


class Link(StreamProtocol):
    """Connects a role's core with one transport.

    welcomed, ended: resolve when the dispatcher has welcomed this client, and when it has answered
    its goodbye, or with the exception that prevented it. bytes_received: so far.
    heartbeat_interval_s: by the welcome.
    """

    #: A few megabytes in micro-batches; a ping or a commit waits for no more.
    reads_at_once = 16

    def __init__(self, role: Role, loop: asyncio.AbstractEventLoop) -> None:
        self._role, self._core, self._loop = role, role.core, loop
        self._session = Session(role.side, role.limits, role.memory)
        self._arrived: list[tuple[m.Message, memoryview]] = []
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._heartbeat: Heartbeat | None = None
        self._written = 0  # bytes
        self._timer: asyncio.TimerHandle | None = None
        self._leaving = False
        self._confirmed: asyncio.Future[None] | None = None
        self.bytes_received = 0
        self.heartbeat_interval_s = 0.0
        self.welcomed: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def pump(self) -> None:
        """Write the core's messages while there is room, from the welcome on.

        After the goodbye these are answers alone: the last client may still release objects.
        """
        if self._heartbeat is None or not self._writable():
            return
        core, now = self._core, self._loop.time()
        try:
            with self._role.guard:
                for message, payload in (
                    core.take_answers() if self._leaving else core.take_messages(now)
                ):
                    self._write(message, payload)
                    if not self._writable():
                        return
                wait = core.wait(now)
        except Exception as error:  # a bug of ours: no caller would see it
            self._end(error)
            return
        if wait is not None:
            self._pump_at(now + wait)

    async def watch(self, until: asyncio.Future[None]) -> None:
        """Ping when due, until then; raises what ended the connection before."""
        assert self._heartbeat is not None
        heartbeat, left = self._heartbeat, 0
        while not until.done():
            now = self._loop.time()
            if heartbeat.ping_due(now):
                self.ping()
            await asyncio.wait(
                (self.ended, until),
                timeout=heartbeat.wait(now),
                return_when=asyncio.FIRST_COMPLETED,
            )
            # If SIGSTOP has cut the poll short, it has returned nothing: the next one reads.
            await asyncio.sleep(0)
            if self.ended.done():
                await self.ended
            before, left = left, self._left()
            if self._unsent and left > before:
                heartbeat.received()  # it reads, and answers what it has not come to when it has
            heartbeat.check(self._loop.time())

    def ping(self) -> None:
        """Ping now, between the welcome and the goodbye."""
        if self._heartbeat is not None and not self._leaving:
            with self._role.guard:
                self._write(self._core.ping())

    async def acknowledge_bye(self) -> None:
        """Send the last messages and Bye, and wait for the dispatcher's Bye.

        All messages before are safe then. Raises OSError without an answer: the dispatcher may have
        read nothing.
        """
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._room.wait()
                self.pump()
                self._leaving = True
                self._write(m.Bye())
                await self.ended
        except TimeoutError:
            raise TimeoutError("the dispatcher did not answer the goodbye") from None

    async def flush(self) -> None:
        """Say the last things without a goodbye, and wait until the dispatcher has handled them.

        Raises OSError when it does not answer.
        """
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._room.wait()
                self.pump()
                self._confirmed = self._loop.create_future()
                self.ping()
                both = self._confirmed, self.ended
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if self.ended.done():
                    await self.ended
        except TimeoutError:
            raise TimeoutError("the dispatcher did not answer the last ping") from None

    def copy_unsent(self) -> None:
        """Copy unsent payloads: the caller may change his arrays."""
        if isinstance(self._transport, StreamTransport):
            self._transport.copy_unsent()

    def abort(self) -> None:
        """Drop the connection, and messages that have arrived on it."""
        self._end(ConnectionAbortedError("the connection was dropped"))

    @property
    def _unsent(self) -> int:
        """Bytes that were written and that the kernel has no room for yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _left(self) -> int:
        """Bytes that have left; while some are unsent, those that the dispatcher has read."""
        return self._written - self._unsent

    def _writable(self) -> bool:
        # Closed: the dispatcher's last message has come, maybe before the core has handled it.
        closed = self._session.state is SessionState.CLOSED
        return self._room.is_set() and not self.ended.done() and not closed

    def _pump_at(self, due: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._pump_again)

    def _pump_again(self) -> None:
        self._timer = None
        self.pump()

    def _end(self, error: Exception | None) -> None:
        for future in (self.welcomed, self.ended):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # seen: it is raised by whoever awaits, if anyone still does
        self._room.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # -- messages to bytes and back

    def _write(self, message: m.Message, payload: Sequence[Buffer] = ()) -> None:
        if self._transport is None or self._session.state is SessionState.CLOSED:
            return
        nbytes = sum(map(len, payload))
        header = self._session.send(message, nbytes)
        frame = [header, *payload]
        self._written += len(header) + nbytes
        if isinstance(self._transport, StreamTransport):
            self._transport.writelines(frame)
        else:  # TLS makes a record, and keeps a reference, of whatever it is given
            self._transport.write(b"".join(frame))

    def _receive_arrived(self) -> None:
        """Give the core the messages of this turn of the event loop, all at once.

        Each change may wake another thread, which costs more than to receive a micro-batch.
        """
        arrived, self._arrived = self._arrived, []
        if not arrived or self.ended.done():
            return
        try:
            with self._role.guard:
                try:
                    for message, payload in arrived:
                        self._receive(message, payload)
                finally:
                    self._role.changed()
        except Exception as error:
            self._end(error)
            return
        self.pump()

    def _receive(self, message: m.Message, payload: memoryview) -> None:
        if type(message) not in OF_CONNECTIONS:
            self._core.receive(message, payload, self._loop.time())
            if isinstance(message, m.Pong) and self._confirmed and not self._confirmed.done():
                self._confirmed.set_result(None)
            return
        if isinstance(message, m.Error):
            raise refusal(message)
        if isinstance(message, m.Bye) and self._leaving:
            self._end(None)
            return
        now = self._loop.time()
        self._core.receive(message, payload, now)
        if isinstance(message, (m.WelcomeProducer, m.WelcomeRank)) and not self.welcomed.done():
            self.heartbeat_interval_s = message.heartbeat_interval_s
            self._heartbeat = Heartbeat(self.heartbeat_interval_s, now)
            self.welcomed.set_result(None)

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce the client."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        with self._role.guard:
            self._write(self._core.hello())

    def get_buffers(self) -> list[memoryview]:
        """Memory that the next bytes belong into."""
        return self._session.get_buffers()

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes are in `get_buffers`."""
        self.bytes_received += nbytes
        if self._heartbeat is not None:
            self._heartbeat.received()
        try:
            for message, parts in self._session.received(nbytes):
                self._arrived.append((message, parts[0] if parts else NO_PAYLOAD))
                if len(self._arrived) == 1:
                    self._loop.call_soon(self._receive_arrived)
        except Exception as error:
            self._receive_arrived()
            self._end(error)

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._room.clear()

    def resume_writing(self) -> None:
        """There is room again."""
        self._room.set()
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is over."""
        self._receive_arrived()
        self._end(error or ConnectionError("the dispatcher closed the connection"))
        # Now, not when cycles are looked for: trainers put that off, and an error holds us.
        self._transport = None
        self._session.drop()
