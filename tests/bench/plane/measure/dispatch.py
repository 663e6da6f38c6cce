"""`dispatch-latency-512x8`: how long ranks that wait for a full window wait.

512 samples of 26 kB in the mean over 8 DP ranks, in micro-batches of 8, from a window of 640 that
is full. Ranks prefetch nothing, so that a step is planned only when all have asked. Taken from
just before the last rank's demand is sent to the first byte of the step at the rank that gets its
first byte last: the plan and everything before the last rank's turn are in it. The ranks are
blocking sockets of one process, which does nothing else meanwhile.
"""

import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.plane.children.children import PATIENCE_S, Child
from tests.bench.plane.load.loads import Load
from tests.bench.plane.planes.plane import WINDOW_MULTIPLE, settings
from tests.bench.plane.rows import Row, latency_rows
from tests.support.client import Rank
from tests.support.server import ServeProcess

DP_SIZE = 8


def dispatch_latency(load: Load, rounds: int) -> Iterator[Row]:
    """Two rows, p50 and p99."""
    order = {"do": "fill", "count": load.batch}
    runs: list[list[float]] = []
    with _serving(load) as (server, producer):
        producer.ask(do="fill", count=int(load.batch * (WINDOW_MULTIPLE - 1)))
        ranks = _join(server.endpoint)
        for begin in range(0, (rounds + 1) * load.steps, load.steps):
            runs.append([])
            for step in range(begin, begin + load.steps):
                producer.ask(**order)
                runs[-1].append(_dispatch(ranks, step))
        for rank in ranks:
            rank.bye()
    yield from latency_rows("dispatch-latency-512x8", runs[1:])


@contextmanager
def _serving(load: Load) -> Iterator[tuple[ServeProcess, Child]]:
    with (
        TemporaryDirectory(prefix="plane-") as folder,
        ServeProcess(Path(folder), checked=False, **settings(load, {"dp_size": DP_SIZE})) as server,
        Child(
            "tests.bench.plane.children.producer", {"endpoint": server.endpoint, **load.order()}
        ) as producer,
    ):
        producer.hear()
        yield server, producer


def _join(endpoint: str) -> list[Rank]:
    first = Rank(endpoint, 0, DP_SIZE, prefetch_steps=0)
    others = (
        Rank(endpoint, dp_rank, DP_SIZE, generation=first.generation, prefetch_steps=0)
        for dp_rank in range(1, DP_SIZE)
    )
    return [first, *others]


def _dispatch(ranks: list[Rank], step: int) -> float:
    """Have one step dispatched, trained and committed; seconds to its last first byte."""
    for rank in ranks[:-1]:
        rank.demand(taken=step - 1)
        rank.settle()  # the dispatcher has heard it
    began = time.monotonic()
    ranks[-1].demand(taken=step - 1)
    last = last_first_byte(ranks)
    prepare(ranks, step)
    train(ranks, step)
    return last - began


def prepare(ranks: list[Rank], step: int) -> None:
    """Receive a step whole and say so."""
    for rank in ranks:
        rank.hold(step)
        rank.prepare(step)


def train(ranks: list[Rank], step: int) -> None:
    """Wait for a step's release and commit it; the dispatcher knows when this returns."""
    for rank in ranks:
        rank.await_release(step)
        rank.demand(taken=step, hungry=False)
        rank.commit(step)
        del rank.steps[step]
    for rank in ranks:
        rank.settle()


def last_first_byte(ranks: list[Rank]) -> float:
    """When every rank had something to read."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank._sock, selectors.EVENT_READ)
        deadline = time.monotonic() + PATIENCE_S
        while selector.get_map():
            ready = selector.select(deadline - time.monotonic())
            if not ready:
                raise TimeoutError("a rank got no step")
            at = time.monotonic()
            for key, _ in ready:
                selector.unregister(key.fileobj)
    return at
