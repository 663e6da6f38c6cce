"""What the journal costs a running dispatcher: from push to commit, with it and without it.

    python -m tests.bench.journal_service [--directory DIR] [--rounds N] [--samples N]

Samples of 26 kB, pushed 64 at a time by producers that each wait for the answer, are planned into
steps of 64 and committed by ranks that only count them. The ways take turns in one run, each time
with new processes and new files; a turn's rate is that of commits between its first quarter and its
end, as /metrics shows them. Every sample must be committed, or the turn does not count.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from rollout_workers.demo.data import leave_with_starter
from rollout_workers.producer.encode import RolloutSample
from rollout_workers.producer.producer import RolloutProducer
from tests.bench.journal import note
from tests.chaos.cluster.processes import Process
from tests.support.server import ServeProcess

TOKENS, BATCH, PRODUCERS, DP_SIZE = 3250, 64, 2, 2
RECORD = 8 * TOKENS
#: Between looks, each of which takes the dispatcher some milliseconds.
POLL_S = 0.1
WAYS: dict[str, dict[str, object]] = {
    "no journal": {},
    "journal, batch": {"journal_sync": "batch"},
}


def produce(endpoint: str, samples: int) -> None:
    """Push so many samples, and wait for each batch to be accepted."""
    leave_with_starter()
    batch = [RolloutSample({"input_ids": np.arange(at, at + TOKENS)}) for at in range(BATCH)]
    with RolloutProducer(endpoint) as producer:
        for _ in range(samples // BATCH):
            producer.push_many(batch)


def turn(folder: Path, way: dict[str, Any], samples: int) -> float:
    """Samples a second."""
    journal: dict[str, Any] = {"journal_dir": folder / "journal", **way} if way else {}
    with ExitStack() as stack:
        server = stack.enter_context(
            ServeProcess(
                folder,
                checked=False,
                dp_size=DP_SIZE,
                global_batch_size=BATCH,
                micro_batch_size=16,
                window=1.5,
                buffer_capacity=8 * BATCH,
                **journal,
            )
        )

        def start(*command: object) -> None:
            process = Process([str(word) for word in command], folder / "clients.log")
            stack.callback(process.kill)

        start("tests.soak.rank", server.endpoint, DP_SIZE, 0)
        server.await_status(ranks_connected=DP_SIZE)
        for _ in range(PRODUCERS):
            start("tests.bench.journal_service", "--produce", server.endpoint, samples // PRODUCERS)
        (first, began), (last, ended) = (_when(server, goal) for goal in (samples // 4, samples))
        assert server.status()["samples_committed"] == samples
    return (last - first) / (ended - began)


def _when(server: ServeProcess, goal: int) -> tuple[float, float]:
    """How many samples are committed once so many are, and when that was seen."""
    while (committed := server.scrape()["samples_committed_total"]) < goal:
        sleep(POLL_S)
    return committed, perf_counter()


def main() -> int:
    """Measure, print and note."""
    options = _options()
    if options.produce is not None:
        produce(options.produce[0], int(options.produce[1]))
        return 0
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(options.rounds):
        for name, way in WAYS.items():
            with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
                rates[name].append(turn(Path(scratch), way, options.samples))
    base = statistics.median(rates["no journal"])
    found = {
        name: {
            "samples_per_second": round(statistics.median(values)),
            "lowest": round(min(values)),
            "highest": round(max(values)),
            "share_of_no_journal": round(statistics.median(values) / base, 3),
        }
        for name, values in rates.items()
    }
    print(f"{options.rounds} rounds of {options.samples} samples of {RECORD} bytes, push to commit")
    for name, one in found.items():
        print(
            f"{name:16} {one['samples_per_second']:6} samples/s ({one['lowest']} to "
            f"{one['highest']})  {one['share_of_no_journal']:5.2f} of no journal"
        )
    note(options.json, push_to_commit=found)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--json", type=Path, default=Path("build/bench/journal.json"))
    parser.add_argument("--produce", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
