"""A window beside none: over a run it must never wait longer than in order of arrival.

Both dispatch the same samples, until the last has left: one giant more or less would tell them
apart by more than a window does.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rollout_planner.types import Strategy, Sync
from tests.bench.cells import Cell, available
from tests.bench.planner import Totals, steady
from tests.peers.lengths import FILES
from tests.peers.measure import ratio
from tests.peers.problem import Figure

#: A run is of so many samples, so that rare ones leave in it, and of some steps at least.
SAMPLES, LEAST_STEPS = 20_000, 15
#: Batch and ranks; the last only one way, as a run of it takes long.
SIZES = ((64, 8), (128, 16), (1024, 64), (4096, 512))
LARGE = 4096
BUDGETS = {
    "lineage": 131072,
    "reasoning_gym": 16384,
    "azure_conv": 32768,
    "azure_code": 32768,
    "deepseek": 32768,
    "tau": 16384,
}
WINDOW = 1.25


def rows() -> Iterator[dict[str, Any]]:
    """A row for each trace, size and way to meet."""
    for name, file in FILES.items():
        for batch, ranks in SIZES:
            for said, plan in _ways(name, batch, ranks):
                cell = Cell(name, batch, ranks, 1.0, file, plan)
                if not available(cell):
                    print(f"window: {name} skipped: its trace is not here")
                    continue
                alone, ours = run(cell), run(replace(cell, window_multiple=WINDOW))
                yield {
                    "case": f"window: {name} {batch}/{ranks} {said}",
                    "corner": "window",
                    "figure": Figure.TIME,
                    "ours": ours,
                    "peer": alone,
                    "best_peer": "ours, no window",
                    "ratio": ratio(ours, alone),
                    "why": "",
                    "others": {},
                }


def _ways(name: str, batch: int, ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A token budget, ranks that meet at every micro-step or once a step; a fixed number, once."""
    budget, share = BUDGETS[name], batch // ranks
    yield f"of {budget}, micro-step", {"micro_batch_tokens": budget}
    if batch < LARGE:
        yield f"of {budget}, step", {"micro_batch_tokens": budget, "sync": Sync.STEP}
        yield f"{share} each, step", {"micro_batch_size": share, "sync": Sync.STEP}


def run(cell: Cell) -> float:
    """Step time over an even share, of all steps of a run together."""
    totals, steps = Totals(), max(SAMPLES // cell.batch, LEAST_STEPS)
    for _, found in steady(cell, Strategy.WINDOW, 1, samples=steps * cell.batch):
        totals.add(found.excess, float(found.cost.sum()) / cell.dp_size)
    return 1 + totals.excess
