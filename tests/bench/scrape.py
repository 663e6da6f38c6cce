"""What a scrape costs a dispatcher that serves, by its number of DP ranks.

A real `dispatcher serve`, real ranks that have trained steps of unequal lengths, told what these
took (`--passes` of each), and wait for the next, asked for what Prometheus asks for. Loop: CPU time
of the thread that runs the event loop, a scrape, less what it needs without. Ping: how long another
rank waits for a pong, at the median and at worst; with scrapes back to back, and without.

    python -m tests.bench.scrape [--passes 2]
"""

import http.client
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from tests.support.client import Producer, Trainer
from tests.support.server import ServeProcess

RANKS = (8, 64, 512)
STEPS = 6
#: What Prometheus 2.53 and 3.x send.
HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Accept-Encoding": "gzip",
}
ROW = "{:>6}  {:>9}  {:>12}  {:>12}  {:>13}  {:>14}"


def main() -> int:
    """Print a row for each number of ranks."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--scrapes", type=int, default=60)
    parser.add_argument("--passes", type=int, default=1, help="that ranks time, of each step")
    given = parser.parse_args()
    print(ROW.format("ranks", "loop ms", "bytes, wire", "bytes, plain", "ping ms quiet", "scraped"))
    for ranks in RANKS:
        with (
            TemporaryDirectory() as folder,
            serving(Path(folder), ranks, given.passes) as (server, trainer),
        ):
            print(row(server, trainer, given.scrapes), flush=True)
    return 0


@contextmanager
def serving(folder: Path, ranks: int, passes: int) -> Iterator[tuple[ServeProcess, Trainer]]:
    """A dispatcher whose ranks have trained a few steps and wait."""
    lengths = np.random.default_rng(0).lognormal(6, 1, (STEPS, 2 * ranks)).astype(int) + 1
    with (
        ServeProcess(
            folder,
            checked=False,
            dp_size=ranks,
            global_batch_size=2 * ranks,
            micro_batch_size=2,
            strategy="kk",
        ) as server,
        Producer(server.endpoint, "p") as producer,
        Trainer(server.endpoint, ranks) as trainer,
    ):
        for step in lengths:
            producer.push(step.tolist())
            trainer.train()
            report(trainer, passes)
        for rank in trainer.ranks:
            rank.demand(taken=trainer.committed)
            rank.settle()
        yield server, trainer


def report(trainer: Trainer, passes: int) -> None:
    """Every rank tells what the last step took: none is more than a tenth slower than another."""
    drawn = np.random.default_rng(trainer.committed)
    for cost_key in ("update", "log-prob", "critic")[:passes]:
        compute = drawn.uniform(5.0, 5.5, len(trainer.ranks)).round(6).tolist()
        for rank, own in zip(trainer.ranks, compute, strict=True):
            busy, inside = [5.6], [5.6 - own]
            rank.send(
                m.StepTimes(
                    step=trainer.committed, cost_key=cost_key, busy_s=busy, collective_s=inside
                )
            )


def row(server: ServeProcess, trainer: Trainer, scrapes: int) -> str:
    """One row, as text."""
    wire, plain = len(scrape(server, HEADERS)), len(scrape(server, {}))
    loop = loop_time(server, scrapes)
    quiet = pings(trainer, threading.Event(), seconds=1.0)
    stop = threading.Event()
    waits: list[float] = []
    pinging = threading.Thread(target=lambda: waits.extend(pings(trainer, stop)))
    pinging.start()
    for _ in range(scrapes):
        scrape(server, HEADERS)
    stop.set()
    pinging.join()
    return ROW.format(
        len(trainer.ranks), f"{loop * 1e3:.2f}", wire, plain, _shown(quiet), _shown(waits)
    )


def loop_time(server: ServeProcess, scrapes: int) -> float:
    """CPU seconds that a scrape takes of the event loop."""

    def spent(what: Callable[[], object]) -> tuple[float, float]:
        begun, used = time.monotonic(), loop_seconds(server)
        for _ in range(scrapes):
            what()
            time.sleep(0.02)
        return loop_seconds(server) - used, time.monotonic() - begun

    idle, for_seconds = spent(lambda: None)
    busy, seconds = spent(lambda: scrape(server, HEADERS))
    return (busy - idle * seconds / for_seconds) / scrapes


def scrape(server: ServeProcess, headers: dict[str, str]) -> bytes:
    """The answer's body, as it is on the wire."""
    at = Endpoint.parse(server.http)
    connection = http.client.HTTPConnection(at.host, at.port, timeout=20)
    try:
        connection.request("GET", "/metrics", headers=headers)
        return connection.getresponse().read()
    finally:
        connection.close()


def pings(trainer: Trainer, stop: threading.Event, seconds: float = 60.0) -> list[float]:
    """How long each ping waited, in seconds."""
    rank, found, end = trainer.ranks[0], [], time.monotonic() + seconds
    while time.monotonic() < end and not stop.is_set():
        begun = time.perf_counter()
        rank.settle()
        found.append(time.perf_counter() - begun)
        time.sleep(0.001)
    return found


def loop_seconds(server: ServeProcess) -> float:
    """CPU time that the process's first thread has had: the one that runs the event loop."""
    path = Path(f"/proc/{server.pid}/task/{server.pid}/schedstat")
    return int(path.read_text().split()[0]) / 1e9


def _shown(waits: list[float]) -> str:
    return f"{median(waits) * 1e3:.2f}, {max(waits) * 1e3:.1f}"


if __name__ == "__main__":
    sys.exit(main())
