"""Unix sockets whose peers send descriptors that take long to close: readers do not wait."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from time import monotonic
from types import ModuleType

import pytest

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport import plain
from rollout_dispatcher.transport.descriptors import sockets
from rollout_dispatcher.transport.descriptors.closing import MOST_THREADS, Closer
from rollout_dispatcher.transport.descriptors.sockets import (
    UnixSocket,
    close_socket,
    let_descriptors_come,
    may_bring_descriptors,
)
from rollout_dispatcher.transport.plain import DescriptorsLost, StreamProtocol, StreamTransport
from rollout_dispatcher.transport.sockets import listening_socket
from tests.support.descriptors import (
    a_descriptor,
    a_lingering_socket,
    kernel_refuses_descriptors,
    send_away,
)
from tests.support.server import eventually

LINGERS_S, AT_ONCE_S = 20, 5.0


@contextmanager
def nobody_waits() -> Iterator[None]:
    began = monotonic()
    yield
    assert monotonic() - began < AT_ONCE_S


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
        assert send_away(theirs, slow)
        assert isinstance(await protocol.lost, DescriptorsLost)


@pytest.mark.asyncio
async def test_what_was_never_read_is_closed_elsewhere() -> None:
    ours, theirs = socket.socketpair()
    protocol = Protocol()
    with theirs, a_lingering_socket(LINGERS_S) as slow:
        transport = StreamTransport(asyncio.get_running_loop(), ours, protocol)
        transport.pause_reading()
        assert send_away(theirs, slow)
        with nobody_waits():
            transport.abort()
            await protocol.lost
            await asyncio.sleep(0)
        hears_the_end(theirs)


@contextmanager
def a_full_closer(monkeypatch: pytest.MonkeyPatch, receiver: ModuleType) -> Iterator[Event]:
    """As many wait to be closed as may, till this is set."""
    may = Event()

    def slowly(descriptor: int) -> None:
        assert may.wait(20)
        os.close(descriptor)

    closer = Closer(slowly, most=1)
    monkeypatch.setattr(receiver, "CLOSER", closer)
    try:
        closer.close([os.open(os.devnull, os.O_RDONLY) for _ in range(MOST_THREADS + 1)])
        eventually(lambda: len(closer._waiting) == 1, "each thread has one, and one waits")
        yield may
    finally:
        may.set()


@pytest.mark.asyncio
async def test_nothing_is_received_while_as_many_wait_to_be_closed_as_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    protocol = Protocol()
    with theirs, a_full_closer(monkeypatch, plain) as may:
        transport = StreamTransport(asyncio.get_running_loop(), ours, protocol)
        theirs.send(b"words")
        for _ in range(20):
            assert not protocol.nbytes
            await asyncio.sleep(0.001)
        may.set()
        async with asyncio.timeout(10):
            await protocol.heard.wait()
        assert protocol.nbytes == len(b"words")
        transport.abort()
        await protocol.lost


@pytest.mark.asyncio
async def test_asyncio_ends_a_connection_that_may_bring_more_than_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    lost = loop.create_future()

    class AsyncioProtocol(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            lost.set_result(exc)

    common, theirs = socket.socketpair()
    ours = UnixSocket.of(common)
    ours.setblocking(False)
    with theirs, a_full_closer(monkeypatch, sockets), a_descriptor() as one:
        await loop.connect_accepted_socket(AsyncioProtocol, ours)
        assert send_away(theirs, os.dup(one))
        async with asyncio.timeout(10):
            assert isinstance(await lost, ConnectionAbortedError)


# -- listeners

refused = pytest.mark.skipif(
    not kernel_refuses_descriptors(), reason="the kernel refuses no descriptors before Linux 6.16"
)


@contextmanager
def connected(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Who has connected to a listener, and the listener, which has not accepted it yet."""
    endpoint = Endpoint.parse(f"unix:{tmp_path}/socket")
    with listening_socket(endpoint) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(endpoint.path)
        yield client, listener


@refused
def test_a_stranger_can_send_none_before_it_is_accepted_nor_after(tmp_path: Path) -> None:
    with connected(tmp_path) as (client, listener), a_descriptor() as one:
        assert not send_away(client, os.dup(one))
        accepted, _ = listener.accept()
        with accepted:
            assert not may_bring_descriptors(accepted)
            assert not send_away(client, os.dup(one))
            client.send(b"words")
            assert accepted.recvmsg(100, 100)[:2] == (b"words", [])


@refused
@pytest.mark.asyncio
async def test_who_can_send_none_is_heard_though_as_many_wait_to_be_closed_as_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = Protocol()
    with connected(tmp_path) as (client, listener), a_full_closer(monkeypatch, plain) as may:
        transport = StreamTransport(asyncio.get_running_loop(), listener.accept()[0], protocol)
        client.send(b"words")
        async with asyncio.timeout(10):
            await protocol.heard.wait()
        transport.take_descriptors(1)
        with a_descriptor() as one:
            assert send_away(client, os.dup(one), b"and one")
        for _ in range(20):
            assert protocol.nbytes == len(b"words")
            await asyncio.sleep(0.001)
        may.set()
        async with asyncio.timeout(10):
            while protocol.nbytes < len(b"wordsand one"):
                protocol.heard.clear()
                await protocol.heard.wait()
        transport.abort()
        await protocol.lost


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
        with listening_socket(Endpoint.parse(f"unix:{path}")) as sock:
            let_descriptors_come(sock, may=True)  # as they do before Linux 6.16
            client.connect(path)
            assert send_away(client, slow)
            began = monotonic()
        assert monotonic() - began < AT_ONCE_S


def test_asyncio_receives_without_waiting_for_descriptors() -> None:
    plain, theirs = socket.socketpair()
    ours = UnixSocket.of(plain)
    with theirs, ours, a_lingering_socket(LINGERS_S) as slow, nobody_waits():
        assert send_away(theirs, slow, b"words")
        assert ours.recv(100) == b"words"
        theirs.close()
        assert ours.recv(100) == b""


def test_asyncio_closes_without_waiting_for_descriptors() -> None:
    plain, theirs = socket.socketpair()
    ours = UnixSocket.of(plain)
    with theirs, a_lingering_socket(LINGERS_S) as slow:
        assert send_away(theirs, slow)
        with nobody_waits():
            ours.close()
        hears_the_end(theirs)
