"""What a running dispatcher holds: memory, descriptors; and whether its loop stood still."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.server import ServeProcess

MIB = 1 << 20
#: The event loop never does one thing for longer than this, whatever it is asked; its own histogram
#: has this bound. Far above what a busy machine adds, far below what an algorithm gone wrong takes.
STALL_S = "2.5"


def anonymous(server: ServeProcess) -> int:
    """Bytes of memory that no file backs."""
    return _status(server, "RssAnon")


def descriptors(server: ServeProcess) -> int:
    """How many files and sockets it has open."""
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def settled(server: ServeProcess) -> int:
    """`anonymous`, after it has answered: all that was sent before is read as far as it will be."""
    server.get("/livez")
    return anonymous(server)


@contextmanager
def bounded(server: ServeProcess, allowed: int) -> Iterator[None]:
    """It grows by so many bytes at the most, and no turn of its event loop takes seconds."""
    before = settled(server)
    yield
    growth = settled(server) - before
    assert growth <= allowed, f"{growth / MIB:.1f} MiB more, of {allowed / MIB:.1f} allowed"
    no_stall(server)


def no_stall(server: ServeProcess) -> None:
    """No turn of the event loop took seconds."""
    found = server.scrape()
    name = "event_loop_lag_seconds"
    late = found[f"{name}_count"] - found[f"{name}_bucket{{le={STALL_S}}}"]
    assert late == 0, f"the event loop stood still {late:g} times for more than {STALL_S} s"


def _status(server: ServeProcess, name: str) -> int:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024
