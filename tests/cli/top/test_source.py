"""A server that is no dispatcher is reported in words, and does not end the view."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rollout_dispatcher.cli.ask import Client, NoAnswer
from rollout_dispatcher.cli.main import main
from rollout_dispatcher.cli.top import parser, read
from tests.cli.top.readings import WORDS, status


@contextmanager
def answering(data: bytes) -> Iterator[Client]:
    """A server that answers this to a request for the status as data."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = data if self.headers["Accept"] == "application/json" else WORDS.encode()
            if self.path == "/v1/clients":
                body = b'{"clients": []}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        client = Client(parser().parse_args(["--http", f"127.0.0.1:{server.server_port}"]), {})
        try:
            yield client
        finally:
            client.close()
            server.shutdown()
            thread.join()


def test_a_dispatcher_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(json.dumps(status(2)).encode()) as client:
        assert read(client).status["dp_size"] == 2
        address = client.address
        client.close()  # the server answers one connection at a time
        asked = ["top", "--http", address, "--interval", "100ms", "--json"]
        assert main([*asked, "--once"]) == 0
        assert main(asked) == 2
    shown = capsys.readouterr()
    none = dict.fromkeys(("steps", "samples", "tokens"), 0.0)
    assert json.loads(shown.out) == {"address": address, "rates": none, "status": status(2)}
    assert "write --once --json" in shown.err


@pytest.mark.parametrize("name", sorted(status(2)))
def test_a_status_without_what_is_shown_is_of_another_release(name: str) -> None:
    found = status(2)
    del found[name]
    with (
        answering(json.dumps(found).encode()) as client,
        pytest.raises(NoAnswer, match="no dispatcher of this release"),
    ):
        read(client)


@pytest.mark.parametrize(
    "data",
    [b"[]", b'"a word"', b"<html>", b"[" * 200_000],
    ids=["a list", "a word", "a page", "deep"],
)
def test_what_is_no_status_is_reported_as_such(data: bytes) -> None:
    with answering(data) as client, pytest.raises(NoAnswer, match="no dispatcher of"):
        read(client)
