"""What a sample costs beside another source tree: CPU time of producer, dispatcher and ranks.

    git worktree add ../before v0.4.0
    python -m tests.bench.plane.beside ../before [--load 26k ...] [--pairs 30]

Two whole planes are alive at once, and run in turn (`tests.bench.pairs`). Shown is this tree's time
over the other's, of each process and of all together: the median of the pairs, and their quartiles.
Linux only.
"""

import argparse
import os
from pathlib import Path

from rollout_dispatcher.cli.demo.processes import signals_unwind
from tests.bench.pairs import in_turn, in_words, spread
from tests.bench.plane.children.children import Child, all_of
from tests.bench.plane.load.loads import LOADS
from tests.support.source import ROOT

WHOLE = Path(__file__).parent / "children" / "whole.py"
#: CPU seconds of one run by process, and of all together; or one plane's over the other's.
Seconds = dict[str, float]


def sources(tree: Path) -> str:
    """What Python looks for modules in, to find this tree's."""
    return os.pathsep.join(map(str, (tree, tree / "dispatcher", tree / "workers")))


def ratios(before: Child, after: Child, pairs: int) -> list[Seconds]:
    """The second plane's seconds over the first's, of each pair of runs."""
    with all_of(before, after):
        for child in (before, after):
            child.hear()
        found = [
            {name: spent / one[name] for name, spent in other.items()}
            for one, other in in_turn(before, after, lambda child, _: _run(child), pairs)
        ]
        for child in (before, after):
            child.ask(do="end")
    return found


def _run(child: Child) -> Seconds:
    found = child.ask(do="run")
    return {"all": sum(found.values()), **found}


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
            found = ratios(theirs, ours, options.pairs)
            for process in found[0]:
                at = spread([pair[process] for pair in found])
                print(f"{name:6} {process:12} {in_words(at)}")


if __name__ == "__main__":
    main()
