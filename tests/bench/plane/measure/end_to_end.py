"""`end-to-end-*`: from push to checked tensors on the ranks, commits included.

One producer process, a `dispatcher serve` process, two rank processes. The clock runs from the
call of the first push to the moment when the last rank has committed the last step. Beside it the
raw relay moves the same bytes; runs alternate, each side after a run that does not count. Ranks
prefetch two steps, as they do where the next step must not wait for a plan.
"""

from collections.abc import Iterator
from tempfile import TemporaryDirectory

from tests.bench.plane.load.loads import Load
from tests.bench.plane.planes.floor import floor
from tests.bench.plane.planes.plane import plane
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
    """The floor's row, then ours."""
    relayed: list[float] = []
    ours: list[float] = []
    with plane(load, rank=RANK) as moving, floor(load, relay=True) as relay:
        moving.join()
        for _ in range(rounds + 1):
            relayed.append(relay.run() / MEGA)
            ours.append(load.run_bytes / moving.run() / MEGA)
        moving.finish()
    yield (bound := row(f"raw-relay-{load.name}", "MB/s", relayed[1:]))
    yield row(f"end-to-end-{load.name}", "MB/s", ours[1:], bound)
