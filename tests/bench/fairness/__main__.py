"""How long a quiet producer waits for its answer beside sixteen that push as fast as they can.

    python -m tests.bench.fairness [--floods NAME ...] [--producers 16] [--seconds 15]

Each flooding producer is a process of its own that always uses up its credits; ranks that only
count take what comes, as fast as it comes. The quiet one pushes a sample of 64 tokens, waits until
it is accepted, and pauses. Shown are quantiles of the seconds until it was *answered* (accepted, or
told that its push is held and why) and until it was *accepted*, by its own clock; and, by the
dispatcher's, from when a message could be read until its answer was written, which leaves out what
the quiet process itself waits for one of the machine's cores.
"""

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from rollout_dispatcher.protocol import messages as m
from tests.bench.fairness.server import FILE, QUIET
from tests.chaos.cluster.processes import Process
from tests.support.client import Producer
from tests.support.server import ServeProcess

DP_SIZE = 2
#: Samples and tokens of a flooding push; `26k` are pushes of 13 MB, `26k-by-64` of 1.7 MB.
FLOODS = {"26k": (512, 3250), "26k-by-64": (64, 3250), "tiny": (512, 1)}
#: Between two pushes of the quiet producer, and until all floods are under way.
PAUSE_S, WARM_UP_S = 0.02, 3.0


def quiet(endpoint: str, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds until each push was answered, and until it was accepted."""
    answered, accepted = [], []
    producer, seq, ends = Producer(endpoint, QUIET), 0, monotonic() + seconds
    while (began := monotonic()) < ends:
        producer.send_push([64], seq=seq)
        first, _ = producer.receive(within=60)
        answered.append(monotonic() - began)
        while not isinstance(first, m.Pushed):
            first, _ = producer.receive(within=60)
        accepted.append(monotonic() - began)
        seq += 1
        sleep(PAUSE_S)
    producer.bye()
    return answered, accepted


def run(folder: Path, flood: str, options: argparse.Namespace, **more: Any) -> None:
    """One dispatcher, one flood."""
    times = folder / "times"
    os.environ[FILE] = str(times)
    with ExitStack() as stack:
        server = stack.enter_context(
            ServeProcess(
                folder,
                checked=False,
                module="tests.bench.fairness.server",
                dp_size=DP_SIZE,
                global_batch_size=512,
                micro_batch_size=16,
                **more,
            )
        )

        def start(*command: object) -> None:
            process = Process([str(word) for word in command], folder / "clients.log")
            stack.callback(process.kill)

        start("tests.soak.rank", server.endpoint, DP_SIZE, 0)
        server.await_status(ranks_connected=DP_SIZE)
        for at in range(options.producers):
            start("tests.bench.fairness.flood", server.endpoint, f"flood-{at}", *FLOODS[flood])
        server.await_scrape(
            lambda seen: seen.get("connections_total{role=producer}", 0) >= options.producers,
            "every flood is connected",
        )
        sleep(WARM_UP_S)
        before, began = server.scrape(), monotonic()
        answered, accepted = quiet(server.endpoint, options.seconds)
        after, ended = server.scrape(), monotonic()
    rate = (after["samples_committed_total"] - before["samples_committed_total"]) / (ended - began)
    print(f"{flood}, {'journal' if 'journal_dir' in more else 'no journal'}: {rate:.0f} samples/s")
    for name, values in (("answered", answered), ("accepted", accepted)):
        print(f"  {name}: {_quantiles(values)}")
    print(f"  answered, by the dispatcher's clock: {_quantiles(_read(times))}")


def _read(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().split()]


def _quantiles(values: list[float]) -> str:
    values = sorted(values)
    p50, p99 = (values[int(share * (len(values) - 1))] for share in (0.5, 0.99))
    return (
        f"p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, max {1e3 * values[-1]:.1f} ms "
        f"({len(values)})"
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=list(FLOODS))
    parser.add_argument("--producers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--journal", choices=["no", "yes", "both"], default="both")
    parser.add_argument("--capacity", type=int, help="buffer that no flood fills")
    options = parser.parse_args()
    more = {} if options.capacity is None else {"buffer_capacity": options.capacity}
    for flood in options.floods:
        for journal in {"no": (False,), "yes": (True,), "both": (False, True)}[options.journal]:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                journaled = {"journal_dir": folder / "journal"} if journal else {}
                run(folder, flood, options, **more, **journaled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
