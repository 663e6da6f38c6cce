"""What a sample costs beside another source tree: CPU time of producer, dispatcher and ranks.

    git worktree add ../before v0.4.0
    python -m tests.bench.plane.beside ../before [--load 26k ...] [--pairs 30]

Whole planes of both trees are alive at once and run in turn, each first in every other pair, so
that whatever else the machine does falls on both. Shown is this tree's time over the other's: the
median of the pairs, and their quartiles. Linux only.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

from rollout_dispatcher.cli.demo.processes import signals_unwind
from tests.bench.plane.children.children import Child, all_of
from tests.bench.plane.load.loads import LOADS, Load
from tests.support.source import ROOT

WHOLE = Path(__file__).parent / "children" / "whole.py"
#: CPU seconds of one run by process, and of all together.
Seconds = dict[str, float]


@contextmanager
def both(other: Path, load: Load) -> Iterator[tuple[Child, Child]]:
    """A plane of the other tree, and one of this, ready to run."""
    theirs, ours = (
        Child(WHOLE, load.order(), environ={"PYTHONPATH": sources(tree)})
        for tree in (other.resolve(), ROOT)
    )
    with all_of(theirs, ours):
        for child in (theirs, ours):
            child.hear()
        yield theirs, ours
        for child in (theirs, ours):
            child.ask(do="end")


def sources(tree: Path) -> str:
    """What Python looks for modules in, to find this tree's."""
    return os.pathsep.join(map(str, (tree, tree / "dispatcher", tree / "workers")))


def run(child: Child) -> Seconds:
    """One run."""
    found = child.ask(do="run")
    return {"all": sum(found.values()), **found}


def ratios(theirs: Child, ours: Child, pairs: int) -> list[Seconds]:
    """Our seconds over theirs, of each pair of runs."""
    found = []
    for pair in range(pairs):
        order = (theirs, ours) if pair % 2 == 0 else (ours, theirs)
        seconds = {child: run(child) for child in order}
        found.append({name: ours_ / seconds[theirs][name] for name, ours_ in seconds[ours].items()})
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path, help="the root of the other source tree")
    parser.add_argument("--load", nargs="+", choices=LOADS, default=["26k"])
    parser.add_argument("--pairs", type=int, default=30, help="of runs, at least 2")
    parser.add_argument("--quick", action="store_true", help="short runs: whether it works at all")
    options = parser.parse_args()
    with signals_unwind():
        for name in options.load:
            load = LOADS[name].quick if options.quick else LOADS[name]
            with both(options.other, load) as (theirs, ours):
                found = ratios(theirs, ours, options.pairs)
            for process in found[0]:
                each = [pair[process] for pair in found]
                low, _, high = quantiles(each, n=4)
                print(f"{name:6} {process:12} {median(each):6.3f}  ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
