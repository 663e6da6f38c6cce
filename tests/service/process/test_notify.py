"""A real `dispatcher serve` under a service manager's socket: what it says, and when."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.service.conftest import SMALL, Serve
from tests.support.server import PATIENCE_S


class Manager:
    """Hears what systemd would hear. abstract: at an address that is in no folder."""

    def __init__(self, folder: Path, *, abstract: bool) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(PATIENCE_S)
        self._socket.bind(f"\0{folder}/notify" if abstract else str(folder / "notify"))
        self.address = f"@{folder}/notify" if abstract else str(folder / "notify")

    def hear(self) -> dict[str, str]:
        lines = self._socket.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def hear_until(self, word: str) -> dict[str, str]:
        deadline = monotonic() + PATIENCE_S
        while word not in (said := self.hear()):
            assert said == {"WATCHDOG": "1"}
            assert monotonic() < deadline, f"it gives signs of life, and does not say {word}"
        return said

    def hear_no_more(self, within: float) -> None:
        """Hear what was said already, and then nothing for so long."""
        self._socket.settimeout(within)
        with contextlib.suppress(TimeoutError):
            for _ in range(5):
                self.hear()
            pytest.fail("it goes on giving signs of life")
        self._socket.settimeout(PATIENCE_S)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=[False, True], ids=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Manager]:
    manager = Manager(tmp_path, abstract=request.param)
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    yield manager
    manager.close()


def test_it_says_when_it_serves_that_it_lives_when_it_reloads_and_when_it_ends(
    manager: Manager, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    server = serve(warm=False, **SMALL)
    ready = manager.hear_until("READY")
    assert ready["READY"] == "1"
    assert server.endpoint in ready["STATUS"]
    for _ in range(5):
        assert manager.hear() == {"WATCHDOG": "1"}
    server.send_signal(signal.SIGHUP)
    assert manager.hear_until("RELOADING")["MONOTONIC_USEC"].isdecimal()
    assert manager.hear_until("READY") == {"READY": "1"}
    server.send_signal(signal.SIGTERM)
    assert manager.hear_until("STOPPING")["STATUS"].startswith("SIGTERM")
    assert server.wait() == 0


def test_a_loop_that_hangs_gives_no_sign_of_life(
    manager: Manager, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    server = serve(warm=False, **SMALL)
    manager.hear_until("READY")
    manager.hear()
    server.send_signal(signal.SIGSTOP)
    manager.hear_no_more(within=1.0)
    server.send_signal(signal.SIGCONT)
    assert manager.hear() == {"WATCHDOG": "1"}


@pytest.mark.parametrize("nobody", ["", "/nonexistent/notify", "relative"])
def test_it_serves_where_nobody_listens(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, nobody: str
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", nobody)
    monkeypatch.setenv("WATCHDOG_USEC", "x" if nobody else "1000000")
    assert serve(warm=False, **SMALL).get("/livez").status == 200
