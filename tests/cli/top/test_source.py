"""Whoever answers: what no dispatcher says is told in words, and ends no view."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rollout_dispatcher.cli.ask import NoAnswer
from rollout_dispatcher.cli.main import main
from rollout_dispatcher.cli.top import Source, parser
from tests.cli.top.readings import WORDS, status


@contextmanager
def answering(said: bytes) -> Iterator[Source]:
    """Something that says this of its status, to who asks for data."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = said if self.headers["Accept"] == "application/json" else WORDS.encode()
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
        source = Source(parser().parse_args(["--http", f"127.0.0.1:{server.server_port}"]), {})
        try:
            yield source
        finally:
            source.client.close()
            server.shutdown()
            thread.join()


def test_a_dispatcher_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(json.dumps(status(2)).encode()) as source:
        assert source.read().said["dp_size"] == 2
        address = source.client.address
        source.client.close()  # the server answers one connection at a time
        asked = ["top", "--http", address, "--interval", "100ms", "--json"]
        assert main([*asked, "--once"]) == 0
        assert main(asked) == 2
    shown = capsys.readouterr()
    none = dict.fromkeys(("steps", "samples", "tokens"), 0.0)
    assert json.loads(shown.out) == {"address": address, "rates": none, "status": status(2)}
    assert "write --once --json" in shown.err


@pytest.mark.parametrize("name", sorted(status(2)))
def test_a_status_without_what_is_shown_is_of_another_release(name: str) -> None:
    said = status(2)
    del said[name]
    telling = answering(json.dumps(said).encode())
    with telling as source, pytest.raises(NoAnswer, match="no dispatcher of this release"):
        source.read()


@pytest.mark.parametrize(
    "said",
    [b"[]", b'"a word"', b"<html>", b"[" * 200_000],
    ids=["a list", "a word", "a page", "deep"],
)
def test_what_is_no_status_is_told_as_such(said: bytes) -> None:
    with answering(said) as source, pytest.raises(NoAnswer, match="no dispatcher of"):
        source.read()
