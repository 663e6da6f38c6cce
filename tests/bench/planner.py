"""Times planning and measures plans, beside greedy, the order of arrival and the lower bound.

    python -m tests.bench.planner [--runs 15] [--steps 40] [--cell NAME ...] [--json FILE]

Planning is timed on windows of the steady state; medians. Excess is the ratio of sums over the
steps, and each strategy has its own stream of the same lengths.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from rollout_planner.planner import plan
from rollout_planner.types import Plan, Strategy, Window
from tests.bench.cells import CELLS, Cell, stream, those_here
from tests.support.windows import refilled

#: Steps before the window has aged: more than max_skips.
WARM_UP = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; excess as a ratio, time in milliseconds."""

    cell: str
    window_ms: float
    window_excess: float
    greedy_excess: float
    fifo_excess: float
    bound_excess: float


@dataclass(slots=True)
class Totals:
    """Sums over steps: time that ranks need together, and total cost / R."""

    time: float = 0.0
    work: float = 0.0

    def add(self, excess: float, work: float) -> None:
        """Count a step of this straggler excess and this cost per rank."""
        self.time += (1 + excess) * work
        self.work += work

    @property
    def excess(self) -> float:
        """Ratio of the sums, minus one."""
        return self.time / self.work - 1


def steady(
    cell: Cell, strategy: Strategy, seed: int, samples: int | None = None
) -> Iterator[tuple[Window, Plan]]:
    """Windows of the steady state and their plans, of so many samples or without end."""
    size = cell.window if strategy is Strategy.WINDOW else cell.batch
    return refilled(islice(stream(cell, seed), samples), size, cell.config(strategy))


def measure(cell: Cell, steps: int, runs: int) -> Row:
    """One row: quality over `steps`, times over `runs`."""
    ours, fifo, bound = Totals(), Totals(), Totals()
    windows: list[Window] = []
    for window, answer in islice(steady(cell, Strategy.WINDOW, 1), WARM_UP, WARM_UP + steps):
        windows.append(window)
        work = float(answer.cost.sum()) / cell.dp_size
        ours.add(answer.excess, work)
        bound.add(max(0.0, answer.lower_bound / work - 1), work)
    greedy = Totals()
    for _, answer in islice(steady(cell, Strategy.GREEDY, 1), steps):
        work = float(answer.cost.sum()) / cell.dp_size
        greedy.add(answer.excess, work)
        fifo.add(answer.fifo_excess, work)
    return Row(
        cell=cell.name,
        window_ms=median_ms(cell, windows, runs),
        window_excess=ours.excess,
        greedy_excess=greedy.excess,
        fifo_excess=fifo.excess,
        bound_excess=bound.excess,
    )


def median_ms(cell: Cell, windows: list[Window], runs: int) -> float:
    """Median milliseconds of a whole plan."""
    config = cell.config(Strategy.WINDOW)
    took = []
    for run in range(runs):
        began = time.perf_counter()
        plan(windows[run % len(windows)], config)
        took.append((time.perf_counter() - began) * 1e3)
    return median(took)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=15, help="timed runs a cell")
    parser.add_argument("--steps", type=int, default=40, help="steps of the steady state")
    parser.add_argument("--cell", nargs="*", help="only these cells")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    print(HEADING)
    rows = []
    for cell in those_here(cell for cell in CELLS if not args.cell or cell.name in args.cell):
        rows.append(measure(cell, args.steps, args.runs))
        print(line(rows[-1]), flush=True)
    if args.json is not None:
        found = {"cells": [asdict(row) for row in rows]}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=2) + "\n")


HEADING = f"{'cell':30} {'ms':>7} | excess % {'ours':>6} {'greedy':>7} {'fifo':>7} {'bound':>7}"


def line(row: Row) -> str:
    """A row as it is printed."""
    return (
        f"{row.cell:30} {row.window_ms:7.2f} |          "
        f"{100 * row.window_excess:6.2f} {100 * row.greedy_excess:7.2f} "
        f"{100 * row.fifo_excess:7.2f} {100 * row.bound_excess:7.2f}"
    )


if __name__ == "__main__":
    main()
