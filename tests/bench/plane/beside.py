"""What a sample costs beside another source tree: CPU time of producer, dispatcher and ranks.

    git worktree add ../before v0.4.0
    python -m tests.bench.plane.beside ../before [--load 26k ...] [--pairs 30]

Shown is this tree's time over the other's: the median of the pairs, and their quartiles (`pairs`).
Linux only.
"""

import argparse
import os
from pathlib import Path

from rollout_dispatcher.cli.demo.processes import signals_unwind
from tests.bench.pairs import in_words
from tests.bench.plane.children.children import Child
from tests.bench.plane.load.loads import LOADS
from tests.bench.plane.pairs import WHOLE, ratios, ready, spreads
from tests.support.source import ROOT


def sources(tree: Path) -> str:
    """What Python looks for modules in, to find this tree's."""
    return os.pathsep.join(map(str, (tree, tree / "dispatcher", tree / "workers")))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path, help="the root of the other source tree")
    parser.add_argument("--load", nargs="+", choices=LOADS, default=["26k"])
    parser.add_argument("--pairs", type=int, default=30, help="of runs, at least 2")
    parser.add_argument("--quick", action="store_true", help="short runs: whether it works at all")
    options = parser.parse_args()
    trees = (options.other.resolve(), ROOT)
    with signals_unwind():
        for name in options.load:
            load = LOADS[name].quick if options.quick else LOADS[name]
            theirs, ours = (
                Child(WHOLE, load.order(), environ={"PYTHONPATH": sources(tree)}) for tree in trees
            )
            with ready(theirs, ours):
                found = spreads(list(ratios(theirs, ours, options.pairs)))
            for process, at in found.items():
                print(f"{name:6} {process:12} {in_words(at)}")


if __name__ == "__main__":
    main()
