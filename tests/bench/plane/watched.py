"""What it costs to be watched: a sample's CPU time with all that tells of it, over without.

    python -m tests.bench.plane.watched [--load 26k] [--pairs 10] [--quick] [--json FILE]

On: ranks time each micro-batch, and a wait for others at the end, as DDP has it, and report every
step; the run is recorded; there is a line of progress every ten seconds. Off: none of that. Ranks
train nothing, so all that a micro-batch costs them counts. Shown is the median of the pairs, and
their quartiles (`pairs`). Processes are started anew every `PAIRS_EACH` pairs: where memory lies
and how hashes fall makes one slower than its twin for as long as it lives. Linux only.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout_dispatcher.cli.demo.processes import signals_unwind
from tests.bench.pairs import in_words
from tests.bench.plane.children.children import Child
from tests.bench.plane.load.loads import LOADS, Load
from tests.bench.plane.pairs import WHOLE, Seconds, ratios, ready, spreads

#: That the same processes run.
PAIRS_EACH = 5
OFF = {"rank": {"measure": False}, "options": {"progress_interval": "none"}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--load", choices=LOADS, default="26k")
    parser.add_argument("--pairs", type=int, default=10, help="of runs, at least 2")
    parser.add_argument("--quick", action="store_true", help="short runs: whether it works at all")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    load = LOADS[options.load].quick if options.quick else LOADS[options.load]
    with signals_unwind():
        found = spreads(list(pairs(load, options.pairs)))
    for process, at in found.items():
        print(f"{process:12} {in_words(at)}")
    if options.json is not None:
        figures = {"load": load.name, "pairs": options.pairs, "processes": found}
        options.json.write_text(json.dumps(figures) + "\n")


def pairs(load: Load, count: int) -> Iterator[Seconds]:
    """With all over with none, of each pair of runs."""
    while count > 0:
        with TemporaryDirectory(prefix="watched-") as folder:
            on = {"options": {"record_dir": folder}}
            without, with_all = (Child(WHOLE, {**load.order(), **how}) for how in (OFF, on))
            with ready(without, with_all):
                yield from ratios(without, with_all, min(count, PAIRS_EACH))
        count -= PAIRS_EACH


if __name__ == "__main__":
    main()
