"""Listeners of both kinds: whatever ends one is told, and what does not end it is survived."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.security import server_tls
from rollout_dispatcher.transport.listener import Listener, ServerTls
from rollout_dispatcher.transport.sockets import listen
from tests.support.certificates import Authority
from tests.support.descriptors import no_more_descriptors
from tests.support.listening import Heard
from tests.transport.test_plain import Recorder

LOOPBACK = Endpoint("127.0.0.1", 0)
KINDS = ["plain", "tls"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> ServerTls:
    pair = authority.issue("127.0.0.1")
    context = server_tls(pair.certificate, pair.key, None)
    return ServerTls(lambda: context, lambda _protocol, _certificate: None, b"TLS, please")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tls: ServerTls) -> ServerTls | None:
    return tls if request.param == "tls" else None


async def hears(heard: Heard, listener: Listener) -> None:
    """Somebody connects, and the handler makes a protocol (or a handshake is awaited)."""
    reader, writer = await asyncio.open_connection(listener.endpoint.host, listener.endpoint.port)
    writer.write(b"hello")
    if heard.handler.tls is not None:
        assert await reader.read() == b"TLS, please"
    writer.close()
    await writer.wait_closed()


def socket_of(listener: Listener) -> socket.socket:
    return listener._sock


async def test_each_scheme_has_a_transport_that_says_where_it_listens(
    tmp_path: Path, tls: ServerTls
) -> None:
    shown = {}
    for scheme, asked in {"tcp": LOOPBACK, "tls": LOOPBACK, "unix": Endpoint(path="u")}.items():
        at = Endpoint(path=str(tmp_path / "u")) if asked.path else asked
        heard = Heard(Recorder, tls if scheme == "tls" else None)
        async with listen(at, heard.handler) as listener:
            shown[scheme] = listener.endpoint.scheme
            assert listener.endpoint.path or listener.endpoint.port
    assert shown == {scheme: scheme for scheme in ("tcp", "tls", "unix")}
    assert not (tmp_path / "u").exists()


async def test_a_socket_that_listens_no_more_is_told_of(kind: ServerTls | None) -> None:
    heard = Heard(Recorder, kind)
    async with listen(LOOPBACK, heard.handler) as listener:
        await hears(heard, listener)
        socket_of(listener).shutdown(socket.SHUT_RDWR)
        async with asyncio.timeout(10):
            await heard.died.wait()
        (error,) = heard.deaths
        assert f"nobody can connect to {listener.endpoint} any more" in str(error)
    assert len(heard.deaths) == 1


async def test_a_protocol_that_cannot_be_made_ends_the_listener() -> None:
    def broken() -> asyncio.BaseProtocol:
        raise RuntimeError("our own bug")

    heard = Heard(broken)
    async with listen(LOOPBACK, heard.handler) as listener:
        reader, writer = await asyncio.open_connection(
            listener.endpoint.host, listener.endpoint.port
        )
        assert await reader.read() == b""
        async with asyncio.timeout(10):
            await heard.died.wait()
        assert "our own bug" in str(heard.deaths[0])
        writer.close()
        await writer.wait_closed()


def failures(listener: Listener) -> int:
    return listener._failures


async def test_want_of_descriptors_is_survived(
    kind: ServerTls | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout_dispatcher.transport.listener.ACCEPT_RETRY_SECONDS", 0.01)
    heard = Heard(Recorder, kind)
    async with listen(LOOPBACK, heard.handler) as listener:
        waiting = socket.socket()
        waiting.connect((listener.endpoint.host, listener.endpoint.port))
        with no_more_descriptors():
            await until(lambda: "could not be accepted" in caplog.text)
            await until(lambda: failures(listener) > 3)
        assert caplog.text.count("could not be accepted") == 1, "it is tried often, and said seldom"
        await hears(heard, listener)
        assert heard.deaths == []
        waiting.close()


@asynccontextmanager
async def client(listener: Listener, tls: ssl.SSLContext) -> AsyncIterator[asyncio.StreamWriter]:
    _, writer = await asyncio.open_connection(
        listener.endpoint.host, listener.endpoint.port, ssl=tls
    )
    yield writer
    writer.close()
    await writer.wait_closed()


async def test_connections_in_a_handshake_are_pending_and_end_with_the_listener(
    tls: ServerTls,
) -> None:
    heard = Heard(Recorder, tls)
    async with listen(LOOPBACK, heard.handler) as listener:
        reader, writer = await asyncio.open_connection(
            listener.endpoint.host, listener.endpoint.port
        )
        await until(lambda: listener.num_pending == 1)
        listener.close()
        await listener.wait_closed()
        assert listener.num_pending == 0
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    assert heard.deaths == []


async def test_a_session_shows_its_certificate_to_the_handler(
    authority: Authority, tmp_path: Path
) -> None:
    shown: list[object] = []
    made: list[Recorder] = []

    def recorder() -> Recorder:
        made.append(Recorder())
        return made[-1]

    pair = authority.issue("127.0.0.1")
    context = server_tls(pair.certificate, pair.key, authority.ca)
    serving = ServerTls(lambda: context, lambda of, shows: shown.append((of, bool(shows))), b"")
    async with listen(LOOPBACK, Heard(recorder, serving).handler) as listener:
        for certificate in (None, authority.issue("trainer.example")):
            async with client(listener, authority.client(certificate)) as writer:
                writer.write(b"hello")
                await until(lambda: made and made[-1].heard == b"hello")
    assert shown == [(made[0], False), (made[1], True)]


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.001)
