"""TLS on both planes: certificates, limits and deadlines hold as they do on plain sockets."""

import http.client
import signal
import socket
import ssl
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.sample import DType
from tests.service.conftest import Serve
from tests.support.certificates import Authority, Pair
from tests.support.client import PATIENCE_S, Producer, Rank, WireClient
from tests.support.server import Response, ServeProcess, eventually, series


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("127.0.0.1", "localhost")


def raw(endpoint: str) -> socket.socket:
    """A plain connection to a TLS port."""
    at = Endpoint.parse(endpoint)
    sock = socket.socket()
    sock.settimeout(PATIENCE_S)
    sock.connect((at.host, at.port))
    return sock


def ask(server: ServeProcess, path: str, tls: ssl.SSLContext) -> Response:
    at = Endpoint.parse(server.http)
    connection = http.client.HTTPSConnection(at.host, at.port, timeout=PATIENCE_S, context=tls)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return Response(answer.status, dict(answer.getheaders()), answer.read().decode())
    finally:
        connection.close()


def count(server: ServeProcess, tls: ssl.SSLContext, role: str, reason: str) -> float:
    found = series(ask(server, "/metrics", tls).text)
    return found.get(f"connection_errors_total{{reason={reason},role={role}}}", 0)


@pytest.fixture
def client(authority: Authority) -> ssl.SSLContext:
    return authority.client()


def greet(server: ServeProcess, tls: ssl.SSLContext) -> None:
    """Somebody well-behaved is served."""
    with WireClient(server.endpoint, tls=tls) as peer:
        peer.send(m.HelloProducer(client_id="polite"))
        peer.expect(m.WelcomeProducer)
        peer.bye()


def test_both_planes_speak_it_and_say_so(serve: Serve, pair: Pair, client: ssl.SSLContext) -> None:
    server = serve(**pair.options())
    assert server.endpoint.startswith("tls://127.0.0.1:")
    assert server.http.startswith("tls://127.0.0.1:")
    greet(server, client)
    assert ask(server, "/readyz", client).status == 200


def test_a_unix_socket_stays_plain_beside_it(
    serve: Serve, pair: Pair, tmp_path: Path, client: ssl.SSLContext
) -> None:
    server = serve(**pair.options(), listen=["127.0.0.1:0", f"unix:{tmp_path}/s"])
    greet(server, client)
    Producer(server.endpoints[1], "p").bye()


def test_wait_ready_needs_the_authority_and_nothing_secret(
    serve: Serve, pair: Pair, authority: Authority
) -> None:
    server = serve(**pair.options(), tls_client_ca=authority.ca)
    probe = ["wait-ready", "--http", server.http, "--timeout"]
    assert main([*probe, "10s", "--tls-ca", str(authority.ca)]) == 0
    assert main([*probe, "10s", "--insecure"]) == 0
    assert main([*probe, "200ms"]) == 1


def test_older_tls_is_refused(serve: Serve, pair: Pair, client: ssl.SSLContext) -> None:
    server = serve(**pair.options())
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with raw(server.endpoint) as sock, pytest.raises((ssl.SSLError, ConnectionError)):
        old.wrap_socket(sock)
    greet(server, client)


def test_a_plain_client_is_told_that_this_is_tls(
    serve: Serve, pair: Pair, client: ssl.SSLContext
) -> None:
    server = serve(**pair.options())
    plain = server.endpoint.removeprefix("tls://")
    with WireClient(plain) as peer:
        peer.send(m.HelloProducer(client_id="p"))
        error = peer.expect_error("tls")
        assert "tls://host:port" in error.message
    at = Endpoint.parse(server.http)
    connection = http.client.HTTPConnection(at.host, at.port, timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    assert answer.status == 400
    assert b"https://" in answer.read()
    connection.close()
    eventually(lambda: count(server, client, "unknown", "plain") == 1, "it is counted")
    eventually(lambda: count(server, client, "http", "plain") == 1, "it is counted")


@pytest.mark.parametrize("said", [b"", b"\x16", bytes.fromhex("1603010200010001fc")], ids=len)
@pytest.mark.parametrize("plane", ["sample", "http"])
def test_a_handshake_that_never_ends_is_ended(
    said: bytes, plane: str, serve: Serve, pair: Pair, client: ssl.SSLContext
) -> None:
    server = serve(**pair.options(), handshake_timeout="500ms")
    role = {"sample": "unknown", "http": "http"}[plane]
    with raw(server.endpoint if plane == "sample" else server.http) as sock:
        sock.sendall(said)
        assert sock.recv(1) == b""
    assert count(server, client, role, "handshake-timeout") == 1
    greet(server, client)


@pytest.mark.parametrize("plane", ["sample", "http"])
def test_connections_that_never_finish_a_handshake_make_room_for_others(
    plane: str, serve: Serve, pair: Pair, client: ssl.SSLContext
) -> None:
    server = serve(**pair.options(), max_pending_connections=3, handshake_timeout="60s")
    at = server.endpoint if plane == "sample" else server.http
    role = {"sample": "unknown", "http": "http"}[plane]
    with ExitStack() as stack:
        strangers = [stack.enter_context(raw(at)) for _ in range(3)]
        for stranger in strangers:
            stranger.sendall(b"\x16")
        greet(server, client)
        assert ask(server, "/livez", client).status == 200
        with suppress(ConnectionResetError):  # nobody has read what it said
            assert strangers[0].recv(1) == b"", "the oldest goes first"
        assert count(server, client, role, "made-room") >= 1


def test_garbage_inside_and_outside_of_tls_harms_nobody(
    serve: Serve, pair: Pair, client: ssl.SSLContext
) -> None:
    server = serve(**pair.options())
    with WireClient(server.endpoint, tls=client) as inside:
        inside.send_bytes(b"GET / HTTP/1.1\r\n\r\n")
        inside.expect_error("protocol")
    with raw(server.endpoint) as outside:
        outside.sendall(b"\x16" * 500)
        assert outside.recv(1) == b""
    eventually(lambda: count(server, client, "unknown", "tls") == 1, "it is counted")
    greet(server, client)


def test_with_a_client_authority_everybody_but_a_probe_shows_a_certificate(
    serve: Serve, pair: Pair, authority: Authority, tmp_path: Path
) -> None:
    server = serve(**pair.options(), tls_client_ca=authority.ca)
    bare, known = authority.client(), authority.client(authority.issue("trainer.example"))
    with WireClient(server.endpoint, tls=bare) as stranger:
        stranger.send(m.HelloProducer(client_id="p"))
        assert "--tls-client-ca" in stranger.expect_error("unauthorized").message
    assert ask(server, "/metrics", bare).status == 401
    assert ask(server, "/livez", bare).status == 200
    assert ask(server, "/readyz", bare).status == 200
    greet(server, known)
    assert count(server, known, "unknown", "unauthorized") == 1
    assert count(server, known, "http", "unauthorized") == 1

    forger = Authority(tmp_path, "forged").issue("trainer.example")
    with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
        greet(server, authority.client(forger))
    eventually(lambda: count(server, known, "unknown", "tls") == 1, "the forger is counted")


def fill_a_large_step(server: ServeProcess, tls: ssl.SSLContext) -> None:
    """One micro-batch of some 40 MB: larger than all that kernels buffer."""
    with WireClient(server.endpoint, tls=tls) as peer:
        peer.send(m.HelloProducer(client_id="p"))
        peer.expect(m.WelcomeProducer)
        for seq in range(4):
            peer.send(*large_push(seq))
            assert peer.expect(m.Pushed).outcomes == ["accepted"]
        peer.bye()


def large_push(seq: int) -> tuple[m.Push, bytes]:
    tokens = 2**20
    push = m.Push(
        first_seq=seq,
        floor=0,
        fields=[m.FieldHeader(name="input_ids", dtype=DType.INT64)],
        tokens=[tokens],
        loss_tokens=[tokens - 1],
        sample_ids=[f"p/{seq}"],
    )
    return push, bytes([seq]) * (8 * tokens)


LARGE = {"dp_size": 1, "micro_batch_tokens": 2**22}


def test_renewed_certificates_count_after_sighup_for_new_connections(
    serve: Serve, tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    server = serve(**pair.options(), tls_client_ca=authority.ca)
    old, mine = authority.client(), authority.issue("client")
    old.load_cert_chain(mine.certificate, mine.key)
    newer = Authority(tmp_path, "newer")
    renewed, theirs = newer.issue("127.0.0.1", "localhost"), newer.issue("client")
    new = newer.client(theirs)
    with WireClient(server.endpoint, tls=old) as connected:
        connected.send(m.HelloProducer(client_id="p"))
        connected.expect(m.WelcomeProducer)
        for source, place in (
            (renewed.certificate, pair.certificate), (renewed.key, pair.key),
            (newer.ca, authority.ca),
        ):  # fmt: skip
            place.write_bytes(source.read_bytes())
        server.send_signal(signal.SIGHUP)
        eventually(lambda: "certificates are as their files say" in server.log(), "they are read")
        greet(server, new)
        assert ask(server, "/statusz", new).status == 200
        for plane in (server.endpoint, server.http):
            with pytest.raises(ssl.SSLError), WireClient(plane, tls=old):
                pass
        connected.send(m.Ping())
        connected.expect(m.Pong)  # who is connected stays
    pair.key.write_text("no key")
    server.send_signal(signal.SIGHUP)
    eventually(lambda: "SIGHUP: nothing changes: " in server.log(), "what is wrong is refused")
    greet(server, new)


def test_a_rank_that_stops_reading_is_dropped(
    serve: Serve, pair: Pair, client: ssl.SSLContext
) -> None:
    server = serve(**pair.options(), **LARGE, write_timeout="1s")
    fill_a_large_step(server, client)
    with Rank(server.endpoint, 0, 1, receive_buffer=4096, tls=client) as deaf:
        deaf.demand(taken=-1)
        eventually(
            lambda: count(server, client, "rank", "write-timeout") == 1, "the deaf rank is dropped"
        )
    greet(server, client)
