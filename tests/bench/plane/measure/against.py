"""`against-*`: the same samples through what else there is, each peer at its best batch size.

26 kB samples from one producer process to two consumer processes that check what they get. A run
for each batch size finds the peer's best, and one for each size of a step ours; then runs of the
peer's best, of our best and of our steps as they are elsewhere (`end-to-end`) alternate, and of the
floor: what moves the same bytes in the same way and decides nothing. Our ranks prefetch as those of
`end-to-end` do; peers' consumers find whatever their queue has. Peers live in an environment of
their own, which `make bench-plane` makes; without it these rows are left out, which is said.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from secrets import token_hex
from tempfile import TemporaryDirectory

from tests.bench.plane.children.children import Child
from tests.bench.plane.load.loads import Load
from tests.bench.plane.measure.end_to_end import RANK
from tests.bench.plane.planes.floor import floor
from tests.bench.plane.planes.plane import Plane, plane
from tests.bench.plane.rows import Row, row
from tests.support.source import ROOT

#: The interpreter of the peers' environment.
PYTHON = ROOT / "build" / "bench" / "peers-plane" / "bin" / "python"
RATE = "samples/s"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who we are compared with. batches: sizes to try. samples: of a run."""

    name: str
    module: str
    batches: tuple[int, ...]
    samples: int


TRANSFERQUEUE = Peer("transferqueue", "transferqueue", (64, 512, 2048), 16384)
#: Samples of our steps, that of the load's own beside them. A quarter of one is a push.
OUR_BATCHES = (1024, 2048)
#: No larger than the pool: Ray would send a sample that is twice in a message once.
RAY = Peer("ray", "ray_queue", (8, 64, 256, 512), 16384)


def against(name: str, peer: Peer, load: Load, rounds: int) -> Iterator[Row]:
    """The peer's rows, one a batch size; the floor's; ours, one a size of steps, and the best.

    Where the peer is not installed there are none.
    """
    if not PYTHON.exists():
        print(f"{name} skipped: {PYTHON} is not there; `make bench-plane` makes it")
        return
    module = f"tests.bench.plane.peers.{peer.module}"
    loads = [load, *(load.stepping(batch, batch // 4) for batch in OUR_BATCHES)]
    with (
        _environ() as environ,
        Child(module, {}, str(PYTHON), environ) as theirs,
        floor(load, relay=True) as bare,
        _planes(loads) as ours,
    ):
        theirs.hear()

        def run(batch: int) -> float:
            return peer.samples / float(theirs.ask(batch=batch, count=peer.samples)["seconds"])

        run(peer.batches[-1])  # whatever has to warm up
        tried = {batch: [run(batch)] for batch in peer.batches}
        best = max(tried, key=lambda batch: tried[batch][0])
        for moving in ours.values():
            moving.run()
        found = {batch: [_rate(moving)] for batch, moving in ours.items()}
        our_best = max(found, key=lambda batch: found[batch][0])
        floors = []
        for _ in range(rounds):
            for batch in dict.fromkeys((load.batch, our_best)):
                found[batch].append(_rate(ours[batch]))
            floors.append(bare.run() * load.samples / load.run_bytes)
            tried[best].append(run(best))
        for moving in ours.values():
            moving.finish()
    rows = {n: row(f"{peer.name}-26k-by-{n}", RATE, runs) for n, runs in tried.items()}
    yield from rows.values()
    yield row(f"{name}-nothing-decided", RATE, floors, rows[best])
    for batch, runs in found.items():
        yield row(f"{name}-by-{batch}", RATE, runs, rows[best])
    yield row(name, RATE, found[our_best], rows[best])


def _rate(moving: Plane) -> float:
    return moving.load.samples / moving.run()


@contextmanager
def _planes(loads: Sequence[Load]) -> Iterator[dict[int, Plane]]:
    """Joined, by the samples of their steps."""
    with ExitStack() as stack:
        found = {}
        for load in loads:
            found[load.batch] = stack.enter_context(plane(load, rank=RANK))
        for moving in found.values():
            moving.join()
        yield found


@contextmanager
def _environ() -> Iterator[dict[str, str]]:
    """Have Ray keep what it writes, its token too, for this run alone."""
    with TemporaryDirectory(prefix="plane-", ignore_cleanup_errors=True) as folder:
        yield {
            "RAY_TMPDIR": folder,
            "RAY_AUTH_TOKEN": token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
