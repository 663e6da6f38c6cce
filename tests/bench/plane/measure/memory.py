"""`memory-held`: how much the dispatcher grows for what it holds.

Samples of 4 kB to 200 kB, 26 kB in the mean, in a window of 5120 of which each step takes 4096, so
that some stay behind every time. When the window is full again, with no step open, the growth of
the process's resident memory since it began to serve is divided by the payload bytes that it holds
then. Everything counts: allocators, what Python keeps for each sample, what was never given back.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.bench.plane.load.loads import Load
from tests.bench.plane.planes.plane import Plane, plane
from tests.bench.plane.rows import Row, row


def memory_held(load: Load, rounds: int) -> Iterator[Row]:
    """One row, a ratio."""
    runs = []
    with plane(load, rank={"prefetch_steps": 0}) as moving:
        moving.join()
        before = resident(moving)
        moving.fill(load.batch // 4)
        for _ in range(rounds + 1):
            for _ in range(load.steps):
                moving.fill(load.batch)
                moving.train(1)
            moving.fill(load.batch)
            moving.server.await_scrape(lambda now: now["samples_in_flight"] == 0, "all committed")
            held = moving.server.scrape()["buffer_bytes"]
            runs.append((resident(moving) - before) / held)
            moving.train(1)
        moving.finish()
    yield row("memory-held", "x payload", runs[1:])


def resident(moving: Plane) -> int:
    """Resident bytes of the dispatcher."""
    for line in Path(f"/proc/{moving.server.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("no VmRSS: this needs Linux")
