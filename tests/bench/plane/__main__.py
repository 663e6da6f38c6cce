"""How fast samples move, beside what the machine can do.

    python -m tests.bench.plane [--rows end-to-end-26k ...] [--quick] [--json FILE]

Each row is printed as soon as it is measured. Rows and their definitions: docs/evidence.md.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rollout_dispatcher.cli.demo.processes import signals_unwind
from tests.bench.plane.load.loads import LOADS, Load
from tests.bench.plane.measure.against import RAY, TRANSFERQUEUE, against
from tests.bench.plane.measure.crowd import dispatch_to_a_crowd
from tests.bench.plane.measure.dispatch import dispatch_latency
from tests.bench.plane.measure.end_to_end import beside_journal, end_to_end
from tests.bench.plane.measure.hops import one_hop, push_to_loop
from tests.bench.plane.measure.memory import memory_held
from tests.bench.plane.rows import Row, write

#: What measures a load in so many rounds.
Measurement = Callable[[Load, int], Iterator[Row]]

MEASUREMENTS: dict[str, tuple[Measurement, Load]] = {
    "end-to-end-1k": (end_to_end, LOADS["1k"]),
    "end-to-end-26k": (end_to_end, LOADS["26k"]),
    "end-to-end-1m": (end_to_end, LOADS["1m"]),
    "end-to-end-50m": (end_to_end, LOADS["50m"]),
    "dispatcher-to-rank-1m": (one_hop, LOADS["1m"]),
    "push-to-loop-50mbps": (push_to_loop, LOADS["hop"]),
    "end-to-end-26k-journal": (beside_journal, LOADS["26k"]),
    "dispatch-latency-512x8": (dispatch_latency, LOADS["512x8"]),
    "dispatch-512-ranks": (dispatch_to_a_crowd, LOADS["crowd"]),
    "memory-held": (memory_held, LOADS["held"]),
    "against-transferqueue": (
        partial(against, "against-transferqueue", TRANSFERQUEUE),
        LOADS["26k"],
    ),
    "against-ray-queue": (partial(against, "against-ray-queue", RAY), LOADS["26k"]),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--rounds", type=int, default=5, help="runs that count, of each side")
    parser.add_argument(
        "--quick", action="store_true", help="one short round: whether it works at all"
    )
    parser.add_argument("--json", type=Path, default=Path("build/bench/plane.json"))
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    rows: list[Row] = []
    with signals_unwind():
        for name in options.rows:
            measure, load = MEASUREMENTS[name]
            for found in measure(load.quick if options.quick else load, rounds):
                rows.append(found)
                print(found, flush=True)
            write(options.json, rows)


if __name__ == "__main__":
    main()
