"""`against-*`: the same samples through what else there is, each peer at its best batch size.

26 kB samples from one producer process to two consumer processes that check what they get, with a
run for each batch size to find the best, then alternating runs of ours and the peer's. Our ranks
prefetch as those of `end-to-end` do; peers' consumers find whatever their queue has.
`shared-against-*` are the same where ours connect over a Unix socket, so that payloads are shared
memory. Peers live in an environment of their own, which `make bench-plane` makes; without it these
rows are left out, which is said.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex
from tempfile import TemporaryDirectory

from tests.bench.plane.children.children import Child
from tests.bench.plane.load.loads import Load
from tests.bench.plane.measure.end_to_end import RANK
from tests.bench.plane.planes.plane import plane
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
#: No larger than the pool: Ray would send a sample that is twice in a message once.
RAY = Peer("ray", "ray_queue", (8, 64, 256, 512), 16384)


def against(
    name: str, peer: Peer, load: Load, rounds: int, *, shared: bool = False
) -> Iterator[Row]:
    """The peer's rows, one a batch size, then ours. shared: over a Unix socket."""
    if not PYTHON.exists():
        print(f"{name} skipped: {PYTHON} is not there; `make bench-plane` makes it")
        return
    module = f"tests.bench.plane.peers.{peer.module}"
    with (
        _environ() as environ,
        Child(module, {}, str(PYTHON), environ) as theirs,
        TemporaryDirectory(prefix="plane-") as folder,
        plane(load, rank=RANK, listen=_address(folder, shared=shared)) as ours,
    ):
        theirs.hear()
        ours.join()

        def run(batch: int) -> float:
            return peer.samples / float(theirs.ask(batch=batch, count=peer.samples)["seconds"])

        run(peer.batches[-1])  # whatever has to warm up
        tried = {batch: [run(batch)] for batch in peer.batches}
        best = max(tried, key=lambda batch: tried[batch][0])
        ours.run()
        rates = []
        for _ in range(rounds):
            rates.append(load.samples / ours.run())
            tried[best].append(run(best))
        ours.finish()
    rows = {n: row(f"{peer.name}-26k-by-{n}", RATE, runs) for n, runs in tried.items()}
    yield from rows.values()
    yield row(name, RATE, rates, rows[best])


def _address(folder: str, *, shared: bool) -> str:
    return f"unix:{folder}/socket" if shared else "127.0.0.1:0"


@contextmanager
def _environ() -> Iterator[dict[str, str]]:
    """Have Ray keep what it writes, its token too, for this run alone."""
    with TemporaryDirectory(prefix="plane-", ignore_cleanup_errors=True) as folder:
        yield {
            "RAY_TMPDIR": folder,
            "RAY_AUTH_TOKEN": token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
