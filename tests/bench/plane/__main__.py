"""How fast samples move, beside what the machine can do.

    python -m tests.bench.plane [--rows end-to-end-26k ...] [--quick] [--json FILE]

Each row is printed as soon as it is measured. Rows and their definitions: docs/performance.md.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from dispatcher.cli.processes import signals_unwind
from tests.bench.plane.end_to_end import end_to_end
from tests.bench.plane.loads import LOADS
from tests.bench.plane.rows import Row, write

Measurement = Callable[[int], Iterator[Row]]

MEASUREMENTS: dict[str, Measurement] = {
    f"end-to-end-{name}": partial(end_to_end, load) for name, load in LOADS.items()
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--rounds", type=int, default=5, help="runs that count, of each side")
    parser.add_argument("--quick", action="store_true", help="one round: whether it works at all")
    parser.add_argument("--json", type=Path, default=Path("build/bench/plane.json"))
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    rows: list[Row] = []
    with signals_unwind():
        for name in options.rows:
            for found in MEASUREMENTS[name](rounds):
                rows.append(found)
                print(found, flush=True)
            write(options.json, rows)


if __name__ == "__main__":
    main()
