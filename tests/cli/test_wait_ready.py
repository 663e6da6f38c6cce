"""`dispatcher wait-ready`: waits for the right one, asks at the right place, and says why not."""

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.service.config.values import RUN_HEADER
from tests.support.certificates import Authority
from tests.support.server import ServeProcess

SMALL: dict[str, Any] = {
    "dp_size": 1,
    "global_batch_size": 1,
    "micro_batch_size": 1,
    "warm": True,
}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "CONFIG", "HTTP", "TLS_CERT", "TLS_CA":
        monkeypatch.delenv(f"DISPATCHER_{name}", raising=False)


class _Answer(http.server.BaseHTTPRequestHandler):
    """Anybody's server: answers `/readyz` as it is told, with a run or without."""

    answers: Iterator[tuple[int, str | None]]

    def do_GET(self) -> None:
        status, run_id = next(self.answers)
        self.send_response(status if self.path == "/readyz" else 404)
        if run_id is not None:
            self.send_header(RUN_HEADER, run_id)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextmanager
def answering(*answers: tuple[int, str | None]) -> Iterator[str]:
    _Answer.answers = iter(answers)
    with http.server.HTTPServer(("127.0.0.1", 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_it_waits_until_the_dispatcher_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    # A proxy's answer comes before a dispatcher's, and the dispatcher's before it is ready.
    with answering((502, None), (503, "a"), (200, "a")) as address:
        assert main(["wait-ready", "--http", address, "--json"]) == 0
    assert next(_Answer.answers, None) is None
    found = json.loads(capsys.readouterr().out)
    assert (found["ready"], found["address"], found["why_not"]) == (True, address, "")
    assert found["waited_s"] > 0


def test_it_gives_up_and_says_what_it_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = f"unix:{tmp_path}/absent.sock"
    assert main(["wait-ready", "--http", nowhere, "--timeout", "1ms", "--json"]) == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert not found["ready"]
    assert "No such file" in found["why_not"]
    assert found["why_not"] in shown.err


def test_it_is_not_content_with_another_server(capsys: pytest.CaptureFixture[str]) -> None:
    with answering((200, None)) as address:
        assert main(["wait-ready", "--http", address]) == 1
        said = capsys.readouterr().err
    assert f"{address} is no dispatcher" in said
    assert "BaseHTTP" in said
    assert len(said.splitlines()) == 1


@contextmanager
def dripping(*pieces: bytes) -> Iterator[str]:
    """A server that answers everybody with these, and then with the last one, bit by bit."""
    over = threading.Event()

    def drip(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            sock.recv(1000)
            for piece in (*pieces[:-1], *[pieces[-1]] * 1000):
                sock.sendall(piece)
                if over.wait(0.05):
                    return

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:

        def accept() -> None:
            while True:
                sock, _ = server.accept()
                if over.is_set():
                    sock.close()
                    return
                threads.submit(drip, sock)

        threads.submit(accept)
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            socket.create_connection(server.getsockname()).close()


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\n", b"X-One: more\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n",),
        (b"HTTP/1.1 503 Wait\r\nContent-Length: 190\r\nConnection: close\r\n\r\n", b"."),
    ],
    ids=["headers", "interim", "body"],
)
def test_a_server_that_never_comes_to_an_end_does_not_keep_it(pieces: tuple[bytes, ...]) -> None:
    began = time.monotonic()
    with dripping(*pieces) as address:
        assert main(["wait-ready", "--http", address, "--timeout", "300ms"]) == 1
        assert time.monotonic() - began < 2  # to the end of the answer it is 5 s and more


def test_it_is_not_content_with_another_run(capsys: pytest.CaptureFixture[str]) -> None:
    with answering((200, "before"), (200, "wanted")) as address:
        assert main(["wait-ready", "--http", address, "--run-id", "wanted"]) == 0
    with answering(*[(200, "other")] * 1000) as address:
        asked = ["wait-ready", "--http", address, "--run-id", "wanted", "--timeout", "300ms"]
        assert main(asked) == 1
    assert "it is ready, but of run other instead of wanted" in capsys.readouterr().err


def test_it_asks_where_serve_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag wins over the environment, that over the file, that over the default."""

    def asked(*flags: str) -> str:
        assert main(["wait-ready", *flags, "--timeout", "1ms"]) == 1
        return capsys.readouterr().err.split(" was not ready")[0].rpartition(" ")[2]

    assert asked() == "127.0.0.1:9471"
    file = tmp_path / "serve.toml"
    file.write_text(f'dp_size = 8\nhttp = "unix:{tmp_path}/file"\n')
    assert asked("--config", str(file)) == f"unix:{tmp_path}/file"
    monkeypatch.setenv("DISPATCHER_CONFIG", str(file))
    assert asked() == f"unix:{tmp_path}/file"
    monkeypatch.setenv("DISPATCHER_HTTP", f"unix:{tmp_path}/environment")
    assert asked() == f"unix:{tmp_path}/environment"
    assert asked("--http", f"unix:{tmp_path}/flag") == f"unix:{tmp_path}/flag"
    monkeypatch.setenv("DISPATCHER_HTTP", "0.0.0.0:1")
    assert asked() == "127.0.0.1:1"
    monkeypatch.setenv("DISPATCHER_HTTP", "[::]:1")
    assert asked() == "[::1]:1"
    monkeypatch.setenv("DISPATCHER_TLS_CERT", "server.pem")
    assert asked() == "tls://[::1]:1"
    monkeypatch.setenv("DISPATCHER_HTTP", f"unix:{tmp_path}/plain")
    assert asked() == f"unix:{tmp_path}/plain"


def test_a_port_that_only_the_dispatcher_knows_needs_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISPATCHER_HTTP", "127.0.0.1:0")
    assert main(["wait-ready"]) == 2
    assert "--ready-file" in capsys.readouterr().err


def test_the_ready_file_names_address_and_run(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    codes: list[int] = []

    def wait() -> None:
        codes.append(main(["wait-ready", "--ready-file", str(file), "--timeout", "20s"]))

    waiting = threading.Thread(target=wait)
    with ServeProcess(first, **SMALL) as before, ServeProcess(second, **SMALL) as wanted:
        stale = json.loads((first / "ready.json").read_text())
        stale["run_id"] = "long gone"  # and its port is another's now
        assert (stale["http"], stale["listen"]) == (before.http, before.endpoints)
        file.write_text(json.dumps(stale))
        waiting.start()
        waiting.join(0.5)
        assert codes == []
        (second / "ready.json").replace(file)
        waiting.join()
        assert codes == [0]
        run_id = wanted.status()["run_id"]
        assert main(["wait-ready", "--http", wanted.http, "--run-id", run_id]) == 0
        assert main(["wait-ready", "--http", before.http, "--ready-file", str(file),
                     "--timeout", "200ms"]) == 1  # fmt: skip


def test_what_is_no_ready_file_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("[]")
    assert main(["wait-ready", "--ready-file", str(tmp_path / "file")]) == 2
    assert "no --ready-file of a dispatcher" in capsys.readouterr().err


def test_in_a_dispatcher_s_environment_it_speaks_as_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Authority(tmp_path).issue("127.0.0.1").options()
    with ServeProcess(tmp_path, **SMALL, **options) as server:
        monkeypatch.setenv("DISPATCHER_HTTP", server.http.removeprefix("tls://"))
        assert main(["wait-ready", "--insecure", "--timeout", "200ms"]) == 1
        monkeypatch.setenv("DISPATCHER_TLS_CERT", str(options["tls_cert"]))
        assert main(["wait-ready", "--insecure"]) == 0
        assert main(["wait-ready", "--timeout", "200ms"]) == 1
