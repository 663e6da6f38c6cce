"""`dispatch-512-ranks`: one dispatcher, 512 rank connections and 64 producers.

A dispatch batch of 4096 samples of 1 kB over 512 DP ranks, 8 a rank, from a window of 5120 that is
full. All ranks ask at once. Taken from just before the last demand is sent to the first byte of the
step at the rank that gets it last. Ranks live in two processes and producers in one, over real
sockets on this machine's cores, which they share with the dispatcher.

`dispatch-512-ranks-loop-lag` is the 99th percentile of the dispatcher's own
`dispatcher_event_loop_lag_seconds` meanwhile, pushes included, interpolated within its bucket.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.plane.children.children import Child, all_of
from tests.bench.plane.load.loads import Load
from tests.bench.plane.planes.plane import WINDOW_MULTIPLE, settings
from tests.bench.plane.rows import Row, latency_rows, row
from tests.support.server import ServeProcess

DP_SIZE = 512
PRODUCERS = 64
PROCESSES = 2


def dispatch_to_a_crowd(load: Load, rounds: int) -> Iterator[Row]:
    """Latency, p50 and p99, and the event loop's lag."""
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
            before: dict[str, float] = {}
            for begin in range(0, (rounds + 1) * load.steps, load.steps):
                steps = range(begin, begin + load.steps)
                runs.append([_dispatch(load, producers, ranks, step) for step in steps])
                before = before or server.scrape()
            after = server.scrape()
    yield from latency_rows("dispatch-512-ranks", runs[1:])
    lag = 1e3 * _quantile(before, after, "event_loop_lag_seconds_bucket", 0.99)
    yield row("dispatch-512-ranks-loop-lag", "ms p99", [lag])


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


def _quantile(
    before: dict[str, float], after: dict[str, float], name: str, quantile: float
) -> float:
    """A quantile of what a histogram counted between two scrapes, as PromQL has it."""
    counts = sorted(
        (float(key.partition("le=")[2].rstrip("}")), value - before[key])
        for key, value in after.items()
        if key.startswith(name)
    )
    rank = quantile * counts[-1][1]
    below, lower = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            return (
                lower
                if bound == float("inf")
                else (lower + (bound - lower) * (rank - below) / (count - below))
            )
        below, lower = count, bound
    return lower
