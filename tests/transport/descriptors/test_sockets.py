"""Unix sockets whose peers send descriptors that take long to close: readers do not wait."""

import asyncio
import os
import socket
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

import pytest

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport import plain
from rollout_dispatcher.transport.descriptors.closing import MOST_THREADS, Closer
from rollout_dispatcher.transport.descriptors.sockets import UnixSocket, close_socket
from rollout_dispatcher.transport.plain import DescriptorsLost, StreamProtocol, StreamTransport
from rollout_dispatcher.transport.sockets import listening_socket
from tests.support.descriptors import a_lingering_socket

LINGERS_S, AT_ONCE_S = 20, 5.0


@contextmanager
def nobody_waits() -> Iterator[None]:
    began = monotonic()
    yield
    assert monotonic() - began < AT_ONCE_S


def send_away(sock: socket.socket, descriptor: int, data: bytes = b"x") -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
    sock.sendmsg([data], [rights])
    os.close(descriptor)


def hears_the_end(sock: socket.socket) -> None:
    """At once; as a reset where what it has sent was thrown away by then."""
    sock.settimeout(AT_ONCE_S)
    with suppress(ConnectionResetError):
        assert sock.recv(1) == b""


class Protocol(StreamProtocol):
    """Takes what comes, and no descriptors."""

    def __init__(self) -> None:
        self.memory, self.nbytes = memoryview(bytearray(100)), 0
        self.heard, self.lost = asyncio.Event(), asyncio.get_running_loop().create_future()

    def get_buffers(self) -> list[memoryview]:
        return [self.memory]

    def buffer_updated(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.heard.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


@pytest.mark.asyncio
async def test_what_was_not_asked_for_is_closed_elsewhere() -> None:
    ours, theirs = socket.socketpair()
    protocol = Protocol()
    with theirs, a_lingering_socket(LINGERS_S) as slow, nobody_waits():
        StreamTransport(asyncio.get_running_loop(), ours, protocol)
        send_away(theirs, slow)
        assert isinstance(await protocol.lost, DescriptorsLost)


@pytest.mark.asyncio
async def test_what_was_never_read_is_closed_elsewhere() -> None:
    ours, theirs = socket.socketpair()
    protocol = Protocol()
    with theirs, a_lingering_socket(LINGERS_S) as slow:
        transport = StreamTransport(asyncio.get_running_loop(), ours, protocol)
        transport.pause_reading()
        send_away(theirs, slow)
        with nobody_waits():
            transport.abort()
            await protocol.lost
            await asyncio.sleep(0)
        hears_the_end(theirs)


@pytest.mark.asyncio
async def test_nothing_is_received_while_as_many_wait_to_be_closed_as_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may = threading.Event()

    def slowly(descriptor: int) -> None:
        assert may.wait(20)
        os.close(descriptor)

    closer = Closer(slowly, most=1)
    monkeypatch.setattr(plain, "CLOSER", closer)
    try:
        closer.close([os.open(os.devnull, os.O_RDONLY) for _ in range(MOST_THREADS + 1)])
        ours, theirs = socket.socketpair()
        protocol = Protocol()
        with theirs:
            transport = StreamTransport(asyncio.get_running_loop(), ours, protocol)
            theirs.send(b"words")
            for _ in range(20):
                assert not protocol.nbytes
                assert closer.is_full
                await asyncio.sleep(0.001)
            may.set()
            async with asyncio.timeout(10):
                await protocol.heard.wait()
            assert protocol.nbytes == len(b"words")
            transport.abort()
            await protocol.lost
    finally:
        may.set()


def test_a_socket_with_nothing_unread_is_closed_at_once() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = ours.fileno()
        close_socket(ours)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        assert theirs.recv(1) == b""


def test_a_listener_does_not_wait_for_what_lies_in_connections_that_it_never_accepted(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as client, a_lingering_socket(LINGERS_S) as slow:
        with listening_socket(Endpoint.parse(f"unix:{path}")):
            client.connect(path)
            send_away(client, slow)
            began = monotonic()
        assert monotonic() - began < AT_ONCE_S


def test_asyncio_receives_without_waiting_for_descriptors() -> None:
    plain, theirs = socket.socketpair()
    ours = UnixSocket.of(plain)
    with theirs, ours, a_lingering_socket(LINGERS_S) as slow, nobody_waits():
        send_away(theirs, slow, b"words")
        assert ours.recv(100) == b"words"
        theirs.close()
        assert ours.recv(100) == b""


def test_asyncio_closes_without_waiting_for_descriptors() -> None:
    plain, theirs = socket.socketpair()
    ours = UnixSocket.of(plain)
    with theirs, a_lingering_socket(LINGERS_S) as slow:
        send_away(theirs, slow)
        with nobody_waits():
            ours.close()
        hears_the_end(theirs)
