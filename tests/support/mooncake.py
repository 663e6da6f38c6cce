"""A Mooncake Store of this machine: a master, and a process that has the memory."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.support.addresses import free_port

MEMORY = "512 MB"
#: Seconds until each of them answers.
STARTS_WITHIN_S = 60.0
_Process = subprocess.Popen[bytes]


class Mooncake:
    """Both processes, each of which may be killed and started again. logs: a folder."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._rpc, self._others = free_port(), list[_Process]()
        self.admin = free_port(self._rpc)
        self._port = free_port(self._rpc, self.admin)
        self.address = f"mooncake://127.0.0.1:{self._rpc}?admin=127.0.0.1:{self.admin}"
        self.master = self._start_master()
        try:
            self.memory = self._start_memory()
        except BaseException:
            _end(self.master)
            raise

    def restart_master(self) -> None:
        """Kill -9: no object is known any more, as a master has that in its memory."""
        _end(self.master)
        self.master = self._start_master()
        wait_until(self._has_memory)

    def restart_memory(self) -> None:
        """Kill -9: the bytes of all objects are gone, of which the master hears by and by."""
        _end(self.memory)
        self.memory = self._start_memory()

    def more_memory(self) -> _Process:
        """One more process that has memory, beside those that run."""
        before = self._segments()
        self._others.append(self._start_memory(free_port(self._rpc, self.admin, self._port)))
        wait_until(lambda: len(self._segments()) > len(before))
        return self._others[-1]

    def close(self) -> None:
        """End all of them."""
        for memory in (self.memory, *self._others):
            _end(memory)
        _end(self.master)

    def _start_master(self) -> _Process:
        started = self._start(
            "mooncake_master", "-rpc_address", "127.0.0.1", "-rpc_port", str(self._rpc),
            "-metrics_host", "127.0.0.1", "-metrics_port", str(self.admin),
            "-enable_http_metadata_server=false",
        )  # fmt: skip
        wait_until(lambda: told(self.admin, "get_all_keys") is not None)
        return started

    def _start_memory(self, port: int | None = None) -> _Process:
        started = self._start(
            "mooncake_client", "-host", "127.0.0.1", "-port", str(port or self._port),
            "-master_server_address", f"127.0.0.1:{self._rpc}",
            "-metadata_server", "P2PHANDSHAKE", "-global_segment_size", MEMORY,
        )  # fmt: skip
        wait_until(self._has_memory)
        return started

    def _has_memory(self) -> bool:
        return bool(self._segments())

    def _segments(self) -> list[bytes]:
        """Those that the master knows, a line each."""
        lines = (told(self.admin, "get_all_segments") or b"").splitlines()
        return [line for line in lines if b"127.0.0.1" in line]

    def _start(self, name: str, *options: str) -> _Process:
        """One of the engine's own processes; it says what it has to say in a file."""
        program = str(Path(sys.executable).with_name(name))
        with (self._logs / name).open("a") as log:
            return subprocess.Popen([program, *options], stdout=log, stderr=log)


@contextmanager
def mooncake_store(logs: Path) -> Iterator[str]:
    """Run one; the address of the store."""
    store = Mooncake(logs)
    try:
        yield store.address
    finally:
        store.close()


def told(admin: int, path: str) -> bytes | None:
    """What the master's administration says, None while it says nothing."""
    try:
        with urlopen(f"http://127.0.0.1:{admin}/{path}", timeout=5) as answer:
            return bytes(answer.read())
    except (URLError, TimeoutError, ConnectionError):
        return None


def wait_until(holds: Callable[[], bool]) -> None:
    """Return once it does."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while not holds():
        assert time.monotonic() < deadline, "Mooncake does not start"
        time.sleep(0.1)


def _end(process: _Process) -> None:
    process.kill()
    process.wait()
