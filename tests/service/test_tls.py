"""TLS on both planes: certificates, limits and deadlines hold as they do on plain sockets."""

import signal
import socket
import ssl
from pathlib import Path

import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from tests.service.conftest import Serve
from tests.support.certificates import Authority, Pair
from tests.support.client import PATIENCE_S, Producer, Rank, WireClient
from tests.support.server import ServeProcess, eventually, series


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


def count(server: ServeProcess, tls: ssl.SSLContext, role: str, reason: str) -> float:
    found = series(server.get("/metrics", tls=tls).text)
    return found.get(f"connection_errors_total{{reason={reason},role={role}}}", 0)


@pytest.fixture
def client(authority: Authority) -> ssl.SSLContext:
    return authority.client()


def greet(server: ServeProcess, tls: ssl.SSLContext) -> None:
    """Somebody well-behaved is served."""
    Producer(server.endpoint, "polite", tls=tls).bye()


def test_both_planes_speak_it_and_say_so(serve: Serve, pair: Pair, client: ssl.SSLContext) -> None:
    server = serve(**pair.options())
    assert server.endpoint.startswith("tls://127.0.0.1:")
    assert server.http.startswith("tls://127.0.0.1:")
    greet(server, client)
    assert server.get("/readyz", tls=client).status == 200


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


def test_a_plain_client_is_told_that_this_is_tls(
    serve: Serve, pair: Pair, client: ssl.SSLContext
) -> None:
    server = serve(**pair.options())
    plain = server.endpoint.removeprefix("tls://")
    with WireClient(plain) as peer:
        peer.send(m.HelloProducer(client_id="p"))
        error = peer.expect_error("tls")
        assert "tls://host:port" in error.message
    answer = server.get("/metrics")
    assert (answer.status, "https://" in answer.text) == (400, True)
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
    assert server.get("/metrics", tls=bare).status == 401
    assert server.get("/livez", tls=bare).status == 200
    assert server.get("/readyz", tls=bare).status == 200
    greet(server, known)
    assert count(server, known, "unknown", "unauthorized") == 1
    assert count(server, known, "http", "unauthorized") == 1

    forger = Authority(tmp_path, "forged").issue("trainer.example")
    with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
        greet(server, authority.client(forger))
    eventually(lambda: count(server, known, "unknown", "tls") == 1, "the forger is counted")


def test_renewed_certificates_count_after_sighup_for_new_connections(
    serve: Serve, tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    server = serve(**pair.options(), tls_client_ca=authority.ca)
    old, mine = authority.client(), authority.issue("client")
    old.load_cert_chain(mine.certificate, mine.key)
    newer = Authority(tmp_path, "newer")
    renewed, theirs = newer.issue("127.0.0.1", "localhost"), newer.issue("client")
    new = newer.client(theirs)
    with Producer(server.endpoint, "p", tls=old) as connected:
        for source, place in (
            (renewed.certificate, pair.certificate), (renewed.key, pair.key),
            (newer.ca, authority.ca),
        ):  # fmt: skip
            place.write_bytes(source.read_bytes())
        server.send_signal(signal.SIGHUP)
        eventually(lambda: "certificates are as their files say" in server.log(), "they are read")
        greet(server, new)
        assert server.get("/statusz", tls=new).status == 200
        for plane in (server.endpoint, server.http):
            with pytest.raises(ssl.SSLError), WireClient(plane, tls=old):
                pass
        connected.ping()  # who is connected stays
    pair.key.write_text("no key")
    server.send_signal(signal.SIGHUP)
    eventually(lambda: "SIGHUP: nothing changes: " in server.log(), "what is wrong is refused")
    greet(server, new)


def test_a_rank_that_stops_reading_is_dropped(
    serve: Serve, pair: Pair, client: ssl.SSLContext
) -> None:
    server = serve(**pair.options(), dp_size=1, micro_batch_tokens=2**22, write_timeout="1s")
    with Producer(server.endpoint, "p", tls=client) as producer:
        for _ in range(4):  # of one micro-batch, larger than all that kernels buffer
            producer.push([2**20])
    with Rank(server.endpoint, 0, 1, receive_buffer=4096, tls=client) as deaf:
        deaf.demand(taken=-1)
        eventually(
            lambda: count(server, client, "rank", "write-timeout") == 1, "the deaf rank is dropped"
        )
    greet(server, client)
