"""`shared-26k`, `shared-1m` and `shared-memory-held`: a Unix socket instead of TCP.

**shared**: `end-to-end`'s runs, whose producer and ranks connect over a Unix socket, so that
payloads are shared memory from push to tensor. Beside them the same over TCP, and floors: blocking
TCP from one sender to two receivers, the raw single hop, which moves the bytes once; sealed
segments through a relay that decides nothing, which is all that can be had of them; and where ours
are held to our TCP, a relay over TCP that decides nothing either, so that those two say how far
ours can be apart. All alternate. `over-tcp-*-producer` and so on are the CPU time that a sample
takes each process.

**shared-memory-held**: `memory-held`'s runs. What is held is what the dispatcher grows by without
its mappings, and all segments whole.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory

from tests.bench.plane.children.whole import spent
from tests.bench.plane.load.loads import Load
from tests.bench.plane.measure.end_to_end import MEGA, RANK
from tests.bench.plane.measure.memory import memory_row, resident
from tests.bench.plane.planes.floor import Floor, floor, raw_relay, segments_floor
from tests.bench.plane.planes.plane import Plane, plane
from tests.bench.plane.rows import Row, row

#: CPU seconds of one run, by process.
Spent = dict[str, float]


def shared(load: Load, rounds: int, *, beside_tcp: bool) -> Iterator[Row]:
    """The floors' rows, that of our TCP, and ours; beside_tcp: it is held to that, else the hop."""
    rates: dict[str, list[float]] = defaultdict(list)
    used: dict[str, list[Spent]] = {"over-tcp": [], "shared": []}
    with (
        TemporaryDirectory(prefix="plane-") as folder,
        plane(load, rank=RANK) as by_tcp,
        plane(load, rank=RANK, listen=f"unix:{folder}/socket") as sharing,
        _floors(load, relay=beside_tcp) as floors,
    ):
        for moving in (by_tcp, sharing):
            moving.join()
        for _ in range(rounds + 1):
            for name, bare in floors.items():
                rates[name].append(bare.run() / MEGA)
            for name, moving in (("over-tcp", by_tcp), ("shared", sharing)):
                before = spent(moving)
                rates[name].append(load.run_bytes / moving.run() / MEGA)
                after = spent(moving)
                used[name].append({who: after[who] - before[who] for who in after})
        for moving in (by_tcp, sharing):
            moving.finish()
    counted = {name: runs[1:] for name, runs in rates.items()}
    yield from _rate_rows(load, counted, beside_tcp=beside_tcp)
    yield from _cpu_rows(load, {name: runs[1:] for name, runs in used.items()})


@contextmanager
def _floors(load: Load, *, relay: bool) -> Iterator[Mapping[str, Floor]]:
    """What moves the same bytes and decides nothing, by name; relay: over two hops of TCP too."""
    with floor(load) as hop, segments_floor(load) as segments, ExitStack() as stack:
        more = {"raw-relay": stack.enter_context(floor(load, raw_relay))} if relay else {}
        yield {"raw-tcp": hop, **more, "raw-segments": segments}


def _rate_rows(
    load: Load, rates: Mapping[str, Sequence[float]], *, beside_tcp: bool
) -> Iterator[Row]:
    """Each beside the hop; what is held to what has come by TCP, beside that."""
    hop = row(f"raw-tcp-{load.name}", "MB/s", rates["raw-tcp"])
    yield hop
    beside = {"raw-segments": "raw-relay", "shared": "over-tcp"} if beside_tcp else {}
    found: dict[str, Row] = {}
    for name in ("raw-relay", "raw-segments", "over-tcp", "shared"):
        if name in rates:
            against = found.get(beside.get(name, ""), hop)
            found[name] = row(f"{name}-{load.name}", "MB/s", rates[name], against)
            yield found[name]


def _cpu_rows(load: Load, used: Mapping[str, Sequence[Spent]]) -> Iterator[Row]:
    """Microseconds of CPU a sample, of each process: over TCP, then shared beside it."""
    for process in used["over-tcp"][0]:
        over_tcp: Row | None = None
        for name, runs in used.items():
            each = [1e6 * run[process] / load.samples for run in runs]
            found = row(f"{name}-{load.name}-{process}", "us/sample", each, over_tcp)
            over_tcp = over_tcp or found
            yield found


def shared_memory_held(load: Load, rounds: int) -> Iterator[Row]:
    """One row, a ratio."""
    with TemporaryDirectory(prefix="plane-") as folder:
        options = {"listen": f"unix:{folder}/socket"}
        yield from memory_row("shared-memory-held", load, rounds, _held, **options)


def _held(moving: Plane) -> int:
    """Bytes of the dispatcher's own, and of segments."""
    segments = int(moving.server.scrape()["shared_memory_bytes"])
    return resident(moving, "RssAnon") + segments
