"""`dispatch-512-ranks`: one dispatcher, 512 rank connections and 64 producers.

A dispatch batch of 4096 samples of 1 kB over 512 DP ranks, 8 a rank, from a window of 5120 that is
full. All ranks ask at once. Taken from just before the last demand is sent to the first byte of the
step at the rank that gets it last. Ranks live in two processes and producers in one, over real
sockets on this machine's cores, which they share with the dispatcher.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.plane.children.children import Child, all_of
from tests.bench.plane.load.loads import Load
from tests.bench.plane.planes.plane import WINDOW_MULTIPLE, settings
from tests.bench.plane.rows import Row, latency_rows
from tests.support.server import ServeProcess

DP_SIZE = 512
PRODUCERS = 64
PROCESSES = 2


def dispatch_to_a_crowd(load: Load, rounds: int) -> Iterator[Row]:
    """Two rows, p50 and p99."""
    with (
        TemporaryDirectory(prefix="plane-") as folder,
        ServeProcess(Path(folder), checked=False, **settings(load, {"dp_size": DP_SIZE})) as server,
    ):
        given = {"endpoint": server.endpoint, "producers": PRODUCERS, **load.order()}
        producers = Child("tests.bench.plane.children.producer", given)
        bounds = pairwise(range(0, DP_SIZE + 1, DP_SIZE // PROCESSES))
        ranks = [
            Child(
                "tests.bench.plane.children.bare_ranks",
                {"endpoint": server.endpoint, "ranks": pair, "dp_size": DP_SIZE},
            )
            for pair in bounds
        ]
        with all_of(producers, *ranks):
            for child in (producers, *ranks):
                child.hear()
            generation = None
            for child in ranks:
                generation = child.ask(do="join", generation=generation)["generation"]
            producers.ask(do="fill", count=int(load.batch * (WINDOW_MULTIPLE - 1)))
            runs: list[list[float]] = []
            for begin in range(0, (rounds + 1) * load.steps, load.steps):
                steps = range(begin, begin + load.steps)
                runs.append([_dispatch(load, producers, ranks, step) for step in steps])
    yield from latency_rows("dispatch-512-ranks", runs[1:])


def _dispatch(load: Load, producers: Child, ranks: list[Child], step: int) -> float:
    """Fill the window, have one step dispatched and committed; seconds to its last first byte."""
    producers.ask(do="fill", count=load.batch)
    for child in ranks:
        child.tell(do="demand", step=step)
    told = [child.hear() for child in ranks]
    for child in ranks:
        child.tell(do="commit", step=step)
    for child in ranks:
        child.hear()
    return float(max(item["last"] for item in told) - max(item["began"] for item in told))
