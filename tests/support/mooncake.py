"""A Mooncake Store of this machine: a master, and a process that has the memory."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.support.addresses import free_port

MEMORY = "512 MB"
#: Seconds until each of them answers.
STARTS_WITHIN_S = 60.0


@contextmanager
def mooncake_store(logs: Path) -> Iterator[str]:
    """Run one; the address of the store."""
    rpc = free_port()
    admin = free_port(rpc)
    client = free_port(rpc, admin)
    master = [
        "mooncake_master", "-rpc_address", "127.0.0.1", "-rpc_port", str(rpc),
        "-metrics_host", "127.0.0.1", "-metrics_port", str(admin),
        "-enable_http_metadata_server=false",
    ]  # fmt: skip
    memory = [
        "mooncake_client", "-host", "127.0.0.1", "-port", str(client),
        "-master_server_address", f"127.0.0.1:{rpc}", "-metadata_server", "P2PHANDSHAKE",
        "-global_segment_size", MEMORY,
    ]  # fmt: skip
    with ExitStack() as processes:
        processes.enter_context(running(master, logs))
        wait_until(lambda: told(admin, "get_all_keys") is not None)
        processes.enter_context(running(memory, logs))
        wait_until(lambda: b"127.0.0.1" in (told(admin, "get_all_segments") or b""))
        yield f"mooncake://127.0.0.1:{rpc}?admin=127.0.0.1:{admin}"


@contextmanager
def running(command: list[str], logs: Path) -> Iterator[None]:
    """One of the engine's own processes; it says what it has to say in a file."""
    program = str(Path(sys.executable).with_name(command[0]))
    with (logs / command[0]).open("w") as log:
        process = subprocess.Popen([program, *command[1:]], stdout=log, stderr=log)
        try:
            yield
        finally:
            process.kill()
            process.wait()


def told(admin: int, path: str) -> bytes | None:
    """What the master's administration says, None while it says nothing."""
    try:
        with urlopen(f"http://127.0.0.1:{admin}/{path}", timeout=5) as answer:
            return bytes(answer.read())
    except URLError:
        return None


def wait_until(holds: Callable[[], bool]) -> None:
    """Return once it does."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while not holds():
        assert time.monotonic() < deadline, "Mooncake does not start"
        time.sleep(0.1)
