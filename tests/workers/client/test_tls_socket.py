"""A TLS socket in a loop that never blocks: nothing that has arrived is left lying."""

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_workers.client.connection import Connection, Waker, connect
from rollout_workers.client.tls_socket import TlsSocket
from tests.support.certificates import Authority
from tests.support.messages import EXAMPLES

LIMITS = FrameLimits(1 << 20, 1 << 26)
Ends = tuple[Connection, ssl.SSLSocket]


@contextmanager
def joined(folder: Path) -> Iterator[tuple[socket.socket, ssl.SSLSocket]]:
    """A client's socket over TLS, and a blocking one at its other end."""
    authority = Authority(folder)
    pair = authority.issue("127.0.0.1")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pair.certificate, pair.key)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        at = Endpoint("127.0.0.1", listener.getsockname()[1], tls=True)
        connecting = threads.submit(connect, at, 10.0, authority.client())
        with server.wrap_socket(listener.accept()[0], server_side=True) as other:
            other.settimeout(20)
            with connecting.result() as sock:
                yield sock, other


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    """The same as a welcomed rank's connection and its other end."""
    with joined(tmp_path) as (sock, other):
        waker = Waker()
        connection = Connection(sock, waker, LIMITS)
        connection.send([EXAMPLES[m.HelloRank]])
        assert connection.poll(0.0) == []
        assert other.recv(1 << 16) == codec.encode(EXAMPLES[m.HelloRank])
        other.sendall(codec.encode(EXAMPLES[m.WelcomeRank]))
        while not connection.poll(20):
            pass
        yield connection, other
        connection.close()
        waker.close()


def test_what_is_decrypted_already_is_not_waited_for(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, other = ends
    large = codec.encode(EXAMPLES[m.MicroBatch], 40_001) + bytes(40_001)
    # A read ends exactly behind the large frame, and its last TLS record holds the small one too.
    monkeypatch.setattr("rollout_workers.client.connection.READ_AT_ONCE", len(large))
    other.sendall(large + codec.encode(m.Pong()))
    seen: list[m.Message] = []
    while len(seen) < 2:
        before = connection.bytes_received
        seen += [message for message, _ in connection.poll(5.0)]
        assert connection.bytes_received > before, "it waited for what it had already"
    assert seen == [EXAMPLES[m.MicroBatch], m.Pong()]


def test_a_poll_waits_for_what_has_not_arrived_and_returns(ends: Ends) -> None:
    connection, other = ends
    assert connection.poll(0.05) == []
    frame = codec.encode(m.Pong())
    other.sendall(frame[:5])
    assert connection.poll(0.05) == []
    other.sendall(frame[5:])
    assert [message for message, _ in connection.poll(20)] == [m.Pong()]


def test_more_than_the_kernel_takes_is_sent_in_the_end(ends: Ends) -> None:
    connection, other = ends
    count = 200_000
    connection.send(m.Ping() for _ in range(count))
    size = count * len(codec.encode(m.Ping()))
    connection.poll(0.0)  # cannot send it all: nobody has read

    def read() -> int:
        got = 0
        while got < size:
            got += len(other.recv(1 << 20))
        other.sendall(codec.encode(m.Pong()))
        return got

    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read)
        while not connection.poll(20):
            pass
        assert reading.result() == size


def test_a_read_into_several_buffers_fills_the_first(tmp_path: Path) -> None:
    with joined(tmp_path) as (sock, other):
        assert isinstance(sock, TlsSocket)
        other.sendall(b"abcdef")
        first, second = bytearray(4), bytearray(4)
        assert sock.recvmsg_into([first, second])[0] == 4
        assert sock.recvmsg_into([second])[0] == 2
        assert bytes(first + second[:2]) == b"abcdef"


def test_the_end_of_the_session_is_the_end_of_the_connection(ends: Ends) -> None:
    connection, other = ends
    other.close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        connection.poll(20)
