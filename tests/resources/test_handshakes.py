"""TLS handshakes that never end: what they take is little, and has a bound."""

import ssl
from pathlib import Path

from tests.resources.measured import anonymous, descriptors
from tests.resources.strangers import strangers
from tests.service.conftest import Serve
from tests.support.certificates import Authority
from tests.support.client import WireClient
from tests.support.server import eventually

CROWD = 500
MIB = 2**20


def client_hello(context: ssl.SSLContext) -> bytes:
    """The first thing that a TLS client says."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(received, sent, server_hostname="127.0.0.1")
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return sent.read()
    raise AssertionError("nobody has answered")


def test_half_handshakes_take_little_memory(serve: Serve, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = serve(**authority.issue("127.0.0.1").options(), handshake_timeout="120s")
    context = authority.client()
    WireClient(server.endpoint, tls=context).close()
    before = anonymous(server)
    with strangers(server.endpoint, CROWD, client_hello(context)) as crowd:
        eventually(lambda: crowd.heard >= CROWD, "each was answered")
        assert descriptors(server) > CROWD
        assert anonymous(server) - before < CROWD * MIB // 8, "a third of what asyncio's would take"
    eventually(lambda: descriptors(server) < CROWD // 10, "they are gone")
    WireClient(server.endpoint, tls=context).close()


def test_handshakes_beyond_the_bound_wait_to_be_accepted(serve: Serve, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = serve(**authority.issue("127.0.0.1").options(), max_pending_connections=64)
    context = authority.client()
    with strangers(server.endpoint, CROWD, client_hello(context)) as crowd:
        eventually(lambda: crowd.came > 2 * CROWD, "they come again")
        assert descriptors(server) < 64 + 32
        WireClient(server.endpoint, tls=context).close()
