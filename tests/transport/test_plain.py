"""The transport over real socket pairs: order, backpressure, and one end told once."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.outbox import MAX_BUFFERS
from rollout_dispatcher.transport.plain import HIGH_WATER_BYTES, StreamProtocol, StreamTransport
from rollout_dispatcher.transport.sockets import listen
from tests.support.listening import Heard

#: More than the kernel keeps between two sockets.
MUCH = 16 << 20


class Recorder(StreamProtocol):
    """Writes down what happens; offers memory in pieces of `pieces` bytes."""

    def __init__(self, pieces: tuple[int, ...] = (3, 5, 65536)) -> None:
        self._pieces = pieces
        self._offered: list[memoryview] = []
        self.heard = bytearray()
        self.events: list[str] = []
        self.lost = asyncio.get_running_loop().create_future()
        self.resumed = asyncio.Event()
        self._changed = asyncio.Event()
        self.keep_open = False

    async def until(self, true: Callable[[], object]) -> None:
        """Return once `true()` is."""
        while not true():
            self._changed.clear()
            await self._changed.wait()

    def get_buffers(self) -> list[memoryview]:
        self._offered = [memoryview(bytearray(size)) for size in self._pieces]
        return self._offered

    def buffer_updated(self, nbytes: int) -> None:
        self.heard += b"".join(self._offered)[:nbytes]
        self._changed.set()

    def eof_received(self) -> bool:
        self.events.append("eof")
        self._changed.set()
        return self.keep_open

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")
        self.resumed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")
        self.lost.set_result(exc)


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[StreamTransport, Recorder, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    recorder = Recorder()
    transport = StreamTransport(asyncio.get_running_loop(), ours, recorder)
    with theirs:
        yield transport, recorder, theirs
        transport.abort()
        await recorder.lost


async def read_all(sock: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        found += await asyncio.get_running_loop().sock_recv(sock, 1 << 20)
    return bytes(found)


async def test_what_arrives_fills_the_buffers_in_order() -> None:
    async with connection() as (_, recorder, theirs):
        sent = bytes(range(256)) * 1000
        await asyncio.get_running_loop().sock_sendall(theirs, sent)
        theirs.close()
        await recorder.lost
        assert bytes(recorder.heard) == sent
        assert recorder.events == ["eof", "lost"]


async def test_many_small_and_large_writes_arrive_in_order() -> None:
    async with connection() as (transport, _, theirs):
        parts = [bytes([at % 251]) * (at % 7) for at in range(3 * MAX_BUFFERS)] + [bytes(MUCH)]
        transport.writelines(parts)
        transport.write(b"last")
        whole = b"".join(parts) + b"last"
        assert await read_all(theirs, len(whole)) == whole


async def test_a_peer_that_does_not_read_pauses_the_writer_until_it_has_read_everything() -> None:
    async with connection() as (transport, recorder, theirs):
        transport.write(bytes(MUCH))
        assert recorder.events == ["pause"]
        assert transport.get_write_buffer_size() > HIGH_WATER_BYTES
        await read_all(theirs, MUCH)
        await recorder.resumed.wait()
        assert recorder.events == ["pause", "resume"]
        assert transport.get_write_buffer_size() == 0


async def test_what_is_unsent_may_change_once_it_was_copied() -> None:
    async with connection() as (transport, _, theirs):
        lent = bytearray(b"x" * MUCH)
        transport.writelines([lent, b"last"])
        transport.copy_unsent()
        lent[:] = bytes(MUCH)
        assert await read_all(theirs, MUCH + 4) == b"x" * MUCH + b"last"


async def test_small_writes_pile_up_to_the_high_water_mark_and_no_further() -> None:
    async with connection() as (transport, recorder, theirs):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        written = 0
        while "pause" not in recorder.events:
            transport.write(bytes(1000))
            written += 1000
            await asyncio.sleep(0)
        assert transport.get_write_buffer_size() <= HIGH_WATER_BYTES + 1000
        await read_all(theirs, written)


async def test_closing_sends_what_was_written_first() -> None:
    async with connection() as (transport, recorder, theirs):
        transport.write(bytes(MUCH))
        transport.close()
        transport.write(b"too late")
        assert len(await read_all(theirs, MUCH)) == MUCH
        assert await recorder.lost is None
        assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b""


async def test_an_abort_drops_what_was_written_and_tells_of_the_end_once() -> None:
    async with connection() as (transport, recorder, _):
        transport.write(bytes(MUCH))
        transport.abort()
        transport.abort()
        await recorder.lost
        assert recorder.events == ["pause", "lost"]
        assert transport.get_write_buffer_size() == 0


async def test_the_end_of_writing_follows_what_was_written_and_reading_goes_on() -> None:
    async with connection() as (transport, recorder, theirs):
        recorder.keep_open = True
        transport.write(b"goodbye")
        transport.write_eof()
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(theirs, 100) == b"goodbye"
        assert await loop.sock_recv(theirs, 100) == b""
        await loop.sock_sendall(theirs, b"so long")
        theirs.close()
        await recorder.until(lambda: "eof" in recorder.events)
        assert recorder.heard == b"so long"


async def test_a_paused_reader_leaves_bytes_with_the_kernel() -> None:
    async with connection() as (transport, recorder, theirs):
        transport.pause_reading()
        theirs.send(b"later")
        await asyncio.sleep(0.01)
        assert recorder.heard == b""
        transport.resume_reading()
        await recorder.until(lambda: recorder.heard)
        assert recorder.heard == b"later"


async def test_a_reset_is_told_with_its_error() -> None:
    recorder = Recorder()
    handler = Heard(lambda: recorder).handler
    async with listen(Endpoint("127.0.0.1", 0), handler) as listener:
        theirs = socket.socket()
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(theirs, (listener.endpoint.host, listener.endpoint.port))
        await loop.sock_sendall(theirs, b"hello")
        await recorder.until(lambda: recorder.heard)
        linger_none = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_none)
        theirs.close()
        assert isinstance(await recorder.lost, ConnectionResetError)


@pytest.mark.parametrize("failing", ["get_buffers", "buffer_updated", "eof_received"])
async def test_a_protocol_that_fails_ends_its_own_connection_and_no_other(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    error = MemoryError("so large a frame")

    def fail(*_: object) -> None:
        raise error

    async with connection() as (_, well, theirs):
        ours, others = socket.socketpair()
        recorder = Recorder()
        monkeypatch.setattr(recorder, failing, fail)
        StreamTransport(asyncio.get_running_loop(), ours, recorder)
        with others:
            others.send(b"x")
            others.shutdown(socket.SHUT_WR)
            assert await recorder.lost is error
        assert [context["exception"] for context in told] == [error]
        theirs.send(b"on")
        await well.until(lambda: well.heard == b"on")
