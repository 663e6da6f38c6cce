"""What a number of `rollout_planner/tuning.py` trades: excess and time with some of its values.

    python -m tests.bench.constants NAME VALUE ... [--cell NAME ...] [--steps 24] [--seeds 2]

    python -m tests.bench.constants TOLERANCE 2e-4 2e-3 1e-2 --cell small

For every cell: the straggler excess of a run's steps together, until the last sample has left, and
the median CPU time of a plan, in milliseconds. All values see the same samples. A cell whose
figures do not move with a number is one that it does not matter to. Groups are not among the cells:
`tests.peers --corner groups` has them.
"""

import argparse
import time
from ast import literal_eval
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from rollout_planner import tuning
from rollout_planner.types import Layout, Strategy, Sync
from tests.bench.cells import CELLS, Cell, available
from tests.bench.planner import Totals, steady

#: Larger ones take long, and tell the same.
LARGEST = 4096
_PADDED_BUDGET: dict[str, Any] = {"micro_batch_tokens": 131072, "layout": Layout.PADDED}
_PIPELINE: dict[str, Any] = {"micro_batch_tokens": 131072, "pipeline_stages": 4}
_STEP: dict[str, Any] = {"micro_batch_tokens": 65536, "sync": Sync.STEP}
#: What the standard cells lack: small steps, budgets that are padded or filled for a whole step,
#: and pipelines.
MORE = (
    Cell("small-64x8-w1", 64, 8, 1.0, "lognormal", {"micro_batch_tokens": 65536}),
    Cell("small-128x16-w1.25", 128, 16, 1.25, "azure2023_code", {"micro_batch_tokens": 13329}),
    Cell("padded-budget-256x8-w1", 256, 8, 1.0, "lognormal", _PADDED_BUDGET),
    Cell("step-budget-1024x64-w1", 1024, 64, 1.0, "lognormal", _STEP),
    Cell("pipeline-256x8-w1", 256, 8, 1.0, "lognormal", _PIPELINE),
)
STANDARD = (*MORE, *(cell for cell in CELLS if cell.batch <= LARGEST))


@contextmanager
def set_to(name: str, value: Any) -> Iterator[None]:
    """This constant has this value. Raises SystemExit if there is no such constant."""
    if not (name.isupper() and hasattr(tuning, name)):
        raise SystemExit(f"{name} is no constant of rollout_planner/tuning.py")
    before = getattr(tuning, name)
    setattr(tuning, name, value)
    try:
        yield
    finally:
        setattr(tuning, name, before)


def measure(cell: Cell, steps: int, seeds: int) -> tuple[float, float]:
    """Excess as a ratio, and milliseconds of CPU time of a plan."""
    totals, times = Totals(), []
    for seed in range(1, seeds + 1):
        began = time.process_time()
        for _, found in steady(cell, Strategy.WINDOW, seed, samples=steps * cell.batch):
            times.append((time.process_time() - began) * 1e3)
            totals.add(found.excess, float(found.cost.sum()) / cell.dp_size)
            began = time.process_time()
    return totals.excess, median(times)


def line(cell: Cell, found: Sequence[tuple[float, float]]) -> str:
    """A cell, and under each value its excess and time."""
    return f"{cell.name:30}" + "".join(f"{100 * e:9.3f} % {ms:6.2f}" for e, ms in found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", help="of the constant")
    parser.add_argument("values", nargs="+", type=literal_eval, help="to try, in Python's notation")
    parser.add_argument("--cell", nargs="*", default=[], help="only cells with this in their name")
    parser.add_argument("--steps", type=int, default=24, help="of a run")
    parser.add_argument("--seeds", type=int, default=2, help="runs of a cell")
    given = parser.parse_args()
    heading = "".join(f"{value!s:>11} {'ms':>6}" for value in given.values)
    print(f"{given.name:30}{heading}")
    for cell in filter(available, STANDARD):
        if given.cell and not any(part in cell.name for part in given.cell):
            continue
        found = []
        for value in given.values:
            with set_to(given.name, value):
                found.append(measure(cell, given.steps, given.seeds))
        print(line(cell, found), flush=True)


if __name__ == "__main__":
    main()
