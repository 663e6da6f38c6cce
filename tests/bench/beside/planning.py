"""Plans of some source tree's cells, each timed when asked for.

Started by its path with that tree in PYTHONPATH, so that a tree is measured that does not have this
file: everything that is imported is the tree's own.
"""

import time
from functools import cache
from itertools import islice

from rollout_planner.planner import plan
from rollout_planner.types import PlanConfig, Strategy, Window
from tests.bench.cells import CELLS, available
from tests.bench.plane.children.children import answer, orders
from tests.bench.planner import WARM_UP, steady

#: Windows of a cell that are planned in turn; each has been once before, which does not count.
WINDOWS = 15


@cache
def windows_of(name: str) -> tuple[list[Window], PlanConfig]:
    """Windows of the steady state, and how they are planned."""
    cell = next(cell for cell in CELLS if cell.name == name)
    found = islice(steady(cell, Strategy.WINDOW, 1), WARM_UP, WARM_UP + WINDOWS)
    return [window for window, _ in found], cell.config(Strategy.WINDOW)


def main() -> None:
    """Plan when told; the answer is the thread's CPU time in milliseconds."""
    answer(cells=[cell.name for cell in CELLS if available(cell)])
    for order in orders():
        windows, config = windows_of(order["cell"])
        began = time.thread_time()
        plan(windows[order["number"] % WINDOWS], config)
        answer(ms=(time.thread_time() - began) * 1e3)


if __name__ == "__main__":
    main()
