"""HTTP clients that are slow, silent, deaf or too many: deadlines end them, nobody else waits."""

import socket
from contextlib import ExitStack

import pytest

from rollout_dispatcher.protocol.endpoint import Endpoint
from tests.service.conftest import Serve
from tests.support.server import PATIENCE_S, ServeProcess, eventually

LIVE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
#: A push of two bytes that are still to come.
BEGUN = b"POST /v1/samples HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"


def connect(server: ServeProcess, receive_buffer: int | None = None) -> socket.socket:
    at = Endpoint.parse(server.http)
    sock = socket.socket()
    sock.settimeout(PATIENCE_S)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect((at.host, at.port))
    return sock


def counted(server: ServeProcess, reason: str) -> float:
    return server.scrape().get(f"connection_errors_total{{reason={reason},role=http}}", 0)


def read_all(sock: socket.socket) -> bytes:
    found = b""
    while data := sock.recv(65536):
        found += data
    return found


@pytest.mark.parametrize(
    "said", [b"", b"G", b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: "], ids=len
)
def test_a_client_that_never_ends_its_request_is_ended(said: bytes, serve: Serve) -> None:
    server = serve(handshake_timeout="400ms")
    with connect(server) as slow:
        slow.sendall(said)
        assert slow.recv(1) == b""
    assert counted(server, "handshake-timeout") == 1
    assert server.get("/readyz").status == 200


def test_dripping_a_byte_now_and_then_does_not_help(serve: Serve) -> None:
    server = serve(handshake_timeout="400ms")
    with connect(server) as slow:
        slow.settimeout(0.05)

        def is_ended() -> bool:
            try:
                slow.sendall(b"X")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        slow.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        eventually(is_ended, "the client that drips is ended")
    assert counted(server, "handshake-timeout") == 1


def test_a_body_that_does_not_arrive_in_time_is_refused(serve: Serve) -> None:
    server = serve(request_timeout="400ms")
    with connect(server) as slow:
        head = b"POST /v1/samples HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        slow.sendall(head + b'{"fields"')
        answer = slow.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.4 s" in answer
    assert server.get("/readyz").status == 200


def test_a_connection_that_asked_once_may_rest(serve: Serve) -> None:
    server = serve(handshake_timeout="300ms")
    with connect(server) as client, connect(server) as silent:
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert silent.recv(1) == b""  # so more than the time for the first request has passed
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_its_answers_is_ended(serve: Serve) -> None:
    server = serve(write_timeout="500ms")
    with connect(server, receive_buffer=4096) as deaf:
        deaf.setblocking(False)
        request = b"GET /statusz HTTP/1.1\r\nHost: x\r\n\r\n" * 100

        def is_ended() -> bool:
            try:
                deaf.send(request)
            except BlockingIOError:
                pass
            except ConnectionError:
                return True
            return counted(server, "write-timeout") == 1

        eventually(is_ended, "the client that reads nothing is ended")
    eventually(lambda: counted(server, "write-timeout") == 1, "it is counted")


def test_connections_that_rest_make_room_for_others_the_longest_first(serve: Serve) -> None:
    server = serve(max_connections=3)
    with ExitStack() as stack:
        resting = [stack.enter_context(connect(server)) for _ in range(3)]
        for client in (*resting, resting[0]):  # so it is the second that has rested longest
            client.sendall(LIVE)
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        with connect(server) as fourth:
            fourth.sendall(LIVE)
            assert fourth.recv(65536).startswith(b"HTTP/1.1 200")
            assert resting[1].recv(1) == b""
            resting[0].sendall(LIVE)
            assert resting[0].recv(65536).startswith(b"HTTP/1.1 200")
    assert counted(server, "made-room") >= 1


def test_while_all_places_are_busy_probes_are_answered_and_pushes_told_to_come_again(
    serve: Serve,
) -> None:
    server = serve(max_connections=3)
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(server)) for _ in range(3)]
        for client in busy:
            client.sendall(BEGUN)
            # Its answer, 100 Continue, says that the request is being served.
            assert client.recv(65536).startswith(b"HTTP/1.1 100")
        assert [server.get(path).status for path in ("/livez", "/metrics")] == [200, 200]
        answer = server.post("/v1/samples", b"{}")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert "serves 3 connections; raise --set max-connections" in answer.text
        assert counted(server, "connection-limit") >= 3
        busy[0].sendall(b"{}")
        assert busy[0].recv(65536).startswith(b"HTTP/1.1 400"), "it was served to its end"
    eventually(lambda: server.post("/v1/samples", b"{}").status == 400, "there is room again")


def test_connections_that_ask_for_nothing_make_room_for_others(serve: Serve) -> None:
    server = serve(max_pending_connections=3, handshake_timeout="60s")
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(3)]
        assert server.get("/livez").status == 200
        assert silent[0].recv(1) == b""
    assert counted(server, "made-room") >= 1
