"""How long plans take beside another source tree, cell by cell: CPU time of one thread.

    git worktree add ../before v0.4.0
    python -m tests.bench.beside ../before [--cell NAME ...] [--pairs 60]

Both trees plan windows of the steady state, each its own, in two processes that take turns, each
first in every other pair, so that whatever else the machine does falls on both. Shown are the
medians of both in milliseconds, and of the pairs this tree's time over the other's with quartiles.
Cells that the other tree lacks are named without figures of it.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from tests.bench.cells import CELLS, available
from tests.bench.pairs import in_turn, in_words, spread
from tests.bench.plane.beside import sources
from tests.bench.plane.children.children import Child, all_of
from tests.support.source import ROOT

PLANNING = Path(__file__).with_name("planning.py")
HEADING = f"{'cell':30} {'other ms':>9} {'this ms':>9} {'pairs':>6}"


def _milliseconds(cell: str, child: Child, number: int) -> float:
    """That one plan took."""
    found: float = child.ask(do="plan", cell=cell, number=number)["ms"]
    return found


def line(cell: str, found: Sequence[Sequence[float]]) -> str:
    """A row of the table; found: milliseconds of the other tree and of this one."""
    other, this = (median(each) for each in zip(*found, strict=True))
    ratios = spread([ours / theirs for theirs, ours in found])
    return f"{cell:30} {other:9.2f} {this:9.2f} {in_words(ratios, 2)}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path, help="the root of the other source tree")
    parser.add_argument("--cell", nargs="*", default=[], help="only cells with this in their name")
    parser.add_argument("--pairs", type=int, default=60, help="of plans of a cell, at least 2")
    options = parser.parse_args()
    trees = (options.other.resolve(), ROOT)
    theirs, ours = (Child(PLANNING, {}, environ={"PYTHONPATH": sources(tree)}) for tree in trees)
    print(HEADING)
    with all_of(theirs, ours):
        known, _ = (set(child.hear()["cells"]) for child in (theirs, ours))
        for cell in filter(available, CELLS):
            if options.cell and not any(part in cell.name for part in options.cell):
                continue
            if cell.name not in known:
                print(f"{cell.name:30} is not in the other tree")
                continue
            plan = partial(_milliseconds, cell.name)
            print(line(cell.name, list(in_turn(theirs, ours, plan, options.pairs))), flush=True)


if __name__ == "__main__":
    main()
