"""`end-to-end-*`: from push to checked tensors on the ranks, commits included.

One producer process, a `dispatcher serve` process, two rank processes. The clock runs from the
call of the first push to the moment when the last rank has committed the last step. Beside it the
raw relay moves the same bytes, and so does one that holds samples as we do and decides nothing;
runs alternate, each side after a run that does not count. Ranks prefetch two steps, as they do
where the next step must not wait for a plan.
"""

from collections.abc import Iterator
from tempfile import TemporaryDirectory

from tests.bench.plane.load.loads import Load
from tests.bench.plane.planes.floor import floor, held_relay, raw_relay
from tests.bench.plane.planes.plane import WINDOW_MULTIPLE, plane
from tests.bench.plane.rows import Row, row

MEGA = 1e6
RANK = {"prefetch_steps": 2}


def beside_journal(load: Load, rounds: int) -> Iterator[Row]:
    """The same runs without and with a journal that is synced before a push is answered."""
    rates: dict[str, list[float]] = {"no-journal": [], "journal": []}
    with (
        TemporaryDirectory(prefix="plane-journal-") as folder,
        plane(load, rank=RANK) as without,
        plane(load, rank=RANK, journal_dir=folder, journal_sync="batch") as journaled,
    ):
        for moving in (without, journaled):
            moving.join()
            moving.run()
        for _ in range(rounds):
            for name, moving in (("no-journal", without), ("journal", journaled)):
                rates[name].append(load.run_bytes / moving.run() / MEGA)
        for moving in (without, journaled):
            moving.finish()
    plain = row(f"end-to-end-{load.name}-no-journal", "MB/s", rates["no-journal"])
    yield plain
    yield row(f"end-to-end-{load.name}-journal", "MB/s", rates["journal"], plain)


def end_to_end(load: Load, rounds: int) -> Iterator[Row]:
    """The floors' rows, then ours."""
    hold = int(load.batch * WINDOW_MULTIPLE)
    rates: dict[str, list[float]] = {"raw-relay": [], "held-relay": [], "end-to-end": []}
    with (
        plane(load, rank=RANK) as moving,
        floor(load, raw_relay) as relay,
        floor(load, held_relay(hold)) as holding,
    ):
        moving.join()
        for _ in range(rounds + 1):
            rates["raw-relay"].append(relay.run() / MEGA)
            rates["held-relay"].append(holding.run() / MEGA)
            rates["end-to-end"].append(load.run_bytes / moving.run() / MEGA)
        moving.finish()
    (first, fastest), *others = rates.items()
    yield (bound := row(f"{first}-{load.name}", "MB/s", fastest[1:]))
    for name, found in others:
        yield row(f"{name}-{load.name}", "MB/s", found[1:], bound)
