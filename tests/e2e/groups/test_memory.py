"""What groups and those who wait cost the dispatcher in memory: within the bound that it states.

Its peak is the system's own figure (VmHWM), so no look at the wrong moment misses it.
"""

import asyncio
from pathlib import Path

import pytest

from tests.e2e.groups.rollouts import shares, together
from tests.e2e.groups.run import PATIENCE_S, Run, in_use

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(100)]

MIB = 2**20


def memory(run: Run, name: str) -> int:
    """VmRSS, what the dispatcher holds now, or VmHWM, the most that it ever held; bytes."""
    lines = Path(f"/proc/{run.server.pid}/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(found)


def test_many_large_pushes_that_wait_take_no_more_than_their_bound(tmp_path: Path) -> None:
    """20 producers push 8 samples of 4 MiB each: 640 MiB for a buffer of 16 MiB."""
    large, room, batch = 4 * MIB, 16 * MIB, 2
    mine = shares(20, 8, lambda _: 1)  # groups of one, so that a push is a sample
    figures: dict[str, int] = {}

    async def watch() -> None:
        await run.until(lambda now: now["pushes_held"] >= len(mine), "every worker waits")
        await settled(run)
        figures["waiting"] = memory(run, "VmHWM")
        await asyncio.to_thread(run.join)

    with in_use(
        tmp_path,
        warm=False,
        ranks=False,
        ballast=large,
        global_batch_size=batch,
        max_open_steps=2,
        buffer_bytes="16MiB",
        blocked_push_bytes="16MiB",
        receive_bytes="16MiB",
    ) as run:
        run.server.scrape()
        base = memory(run, "VmRSS")
        pushing = together(run.books, run.endpoint, mine, at_a_time=8, slowest_s=0)
        run.produce(watch(), pushing)
        figures["peak"] = memory(run, "VmHWM")
        found = run.finish()
    assert found.dropped == {}
    assert found.committed == run.books.accepted
    assert len(found.committed) == 160
    found.assert_accounted(run.books)
    print({name: f"{(value - base) / MIB:.0f} MiB" for name, value in figures.items()})
    bound = 3 * room  # the buffer, what held pushes hold, frames being received
    open_steps = 2 * batch * large
    slack = 16 * MIB  # of the allocator, and of what is no payload
    assert figures["waiting"] - base <= bound + slack
    assert figures["peak"] - base <= bound + open_steps + slack


async def settled(run: Run) -> None:
    """Wait until the dispatcher has received all that it wants for now."""
    before = -1.0
    while (now := run.server.scrape()["process_cpu_seconds_total"]) - before > 0.02:
        before = now
        await asyncio.sleep(0.25)


def test_memory_is_flat_at_ten_times_the_length_with_slow_ranks(tmp_path: Path) -> None:
    length = 160
    mine = shares(4, 10 * length // 4 // 8)
    peaks: list[int] = []

    async def look(goal: int) -> None:
        done = f"{goal} samples are trained on"
        await run.until(lambda now: now["samples_committed_total"] >= goal, done, PATIENCE_S)
        peaks.append(memory(run, "VmHWM"))

    with in_use(tmp_path, warm=False, ranks=False, ballast=64 * 1024) as run:
        run.join_slower_than_producers()
        run.produce(look(length), together(run.books, run.endpoint, mine))
        peaks.append(memory(run, "VmHWM"))
        found = run.finish()
    found.assert_all_committed(run.books, mine)
    early, late = peaks
    print(f"{early / MIB:.0f} MiB after {length} samples, {late / MIB:.0f} after {10 * length}")
    assert late <= 1.1 * early + 4 * MIB
