"""One connection of a client: frames in, frames out, heartbeats, and a goodbye.

An asyncio protocol. It writes the core's messages while the transport has room, so pushes to a slow
dispatcher stay in the core rather than in a buffer, and receives payloads straight into the role's
memory. A failed connection is an OSError; invalid bytes are a ProtocolError.
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
    """The message for an error; that of a foreign error has the name of its type."""
    if isinstance(error, DispatcherError):
        return m.Error(code=error.code, message=str(error), retriable=error.retriable)
    text = f"{type(error).__name__}: {error}"
    return m.Error(code=DispatcherError.code, message=text)


def restored(message: m.Error) -> DispatcherError:
    """The error of a message."""
    # A class precedes its subclasses of the same code.
    kinds = (kind for kind in _kinds(DispatcherError) if kind.code == message.code)
    kind = next(kinds, DispatcherError)
    # Not by its own constructor, which would build the text from other arguments.
    error = kind.__new__(kind, message.message)
    Exception.__init__(error, message.message)
    return error


def _kinds(kind: type[DispatcherError]) -> Iterator[type[DispatcherError]]:
    yield kind
    for special in kind.__subclasses__():
        yield from _kinds(special)


def refusal(message: m.Error) -> Exception:
    """The exception for an Error frame: a ConnectionError if a retry may help."""
    if message.retriable:
        return ConnectionError(f"the dispatcher closed the connection: {message.message}")
    return restored(message)


#: Messages that a link handles too; all others go to the core alone.
OF_CONNECTIONS = frozenset({m.Error, m.Bye, m.WelcomeProducer, m.WelcomeRank})
#: The payload of a message without one.
NO_PAYLOAD = memoryview(b"")


class Link(StreamProtocol):
    """Connects a role's core with one transport.

    welcomed, ended: resolve when the dispatcher has welcomed this client, and when it has answered
    the goodbye; or raise the exception that prevented it. bytes_received: so far.
    heartbeat_interval_s: from the welcome.
    """

    #: A few megabytes of micro-batches, so that pings and commits are not delayed.
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
        """Write the core's messages while there is room, after the welcome.

        After the goodbye only answers are sent: the last client may still release objects.
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
        except Exception as error:  # a bug here, which no caller would see
            self._end(error)
            return
        if wait is not None:
            self._pump_at(now + wait)

    async def watch(self, until: asyncio.Future[None]) -> None:
        """Ping when due, until `until` is done; raises if the connection ends before."""
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
            # A poll that SIGSTOP cut short has returned nothing; the next one reads.
            await asyncio.sleep(0)
            if self.ended.done():
                await self.ended
            before, left = left, self._left()
            if self._unsent and left > before:
                heartbeat.received()  # the dispatcher reads, and answers the Ping behind
            heartbeat.check(self._loop.time())

    def ping(self) -> None:
        """Ping now, between the welcome and the goodbye."""
        if self._heartbeat is not None and not self._leaving:
            with self._role.guard:
                self._write(self._core.ping())

    async def acknowledge_bye(self) -> None:
        """Send the last messages and Bye, and wait for the dispatcher's Bye.

        The answer confirms all earlier messages. Raises OSError without one: the dispatcher may
        have read nothing.
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
        """Copy unsent payloads: the caller may change its arrays."""
        if isinstance(self._transport, StreamTransport):
            self._transport.copy_unsent()

    def abort(self) -> None:
        """Drop the connection, and messages that have arrived on it."""
        self._end(ConnectionAbortedError("the connection was dropped"))

    @property
    def _unsent(self) -> int:
        """Bytes written here that the kernel has not accepted yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _left(self) -> int:
        """Bytes accepted by the kernel; they grow as the dispatcher reads while some are unsent."""
        return self._written - self._unsent

    def _writable(self) -> bool:
        # Closed: the last message has arrived, though the core may not have handled it yet.
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
                future.exception()  # mark it retrieved: perhaps nothing awaits it any more
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
        else:  # TLS makes a record of each piece, and keeps a reference to it
            self._transport.write(b"".join(frame))

    def _receive_arrived(self) -> None:
        """Give the core all messages of this iteration of the event loop at once.

        Each change may wake another thread, which costs more than receiving a micro-batch.
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
        """Memory for the next bytes."""
        return self._session.get_buffers()

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` bytes were read into `get_buffers`."""
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
        # Break the cycle now: trainers delay garbage collection, and an error refers to this link.
        self._transport = None
        self._session.drop()
