"""What the planner is measured on: a dozen cells over sizes, layouts and lengths."""

import csv
import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollout_planner.cost import Quadratic
from rollout_planner.types import Grouping, IntArray, Layout, Oversize, PlanConfig, Strategy, Sync

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration. lengths: a name in `SYNTHETIC`, or of a trace file."""

    name: str
    batch: int
    dp_size: int
    window_multiple: float
    lengths: str
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> int:
        """Samples in a full window."""
        return int(self.window_multiple * self.batch)

    def config(self, strategy: Strategy) -> PlanConfig:
        """How a plan of this cell is made."""
        return PlanConfig(
            dp_size=self.dp_size,
            dispatch_batch_size=self.batch,
            cost=Quadratic(),
            strategy=strategy,
            grouping=Grouping.IGNORE,
            oversize=Oversize.ALONE,
            max_skips=8,
            **self.plan,
        )


def _fixed(size: int, sync: Sync = Sync.MICRO_STEP) -> dict[str, Any]:
    return {"micro_batch_size": size, "sync": sync}


def _budget(tokens: int) -> dict[str, Any]:
    return {"micro_batch_tokens": tokens}


_PADDED = {"micro_batch_size": 4, "layout": Layout.PADDED}
_STEP = _fixed(16, Sync.STEP)

CELLS = (
    Cell("fixed-256x16-w1.25", 256, 16, 1.25, "lognormal", _fixed(1)),
    Cell("budget-256x16-w1.25", 256, 16, 1.25, "lognormal", _budget(131072)),
    Cell("fixed-512x8-w1.25", 512, 8, 1.25, "lognormal", _fixed(1)),
    Cell("fixed-512x16-w1.25", 512, 16, 1.25, "lognormal", _fixed(1)),
    Cell("fixed-512x32-w1.25", 512, 32, 1.25, "lognormal", _fixed(1)),
    Cell("fixed-512x64-w1.25", 512, 64, 1.25, "lognormal", _fixed(1)),
    Cell("budget-512x8-w1.25", 512, 8, 1.25, "lognormal", _budget(131072)),
    Cell("budget-512x16-w1.25", 512, 16, 1.25, "lognormal", _budget(131072)),
    Cell("budget-512x32-w1.25", 512, 32, 1.25, "lognormal", _budget(131072)),
    Cell("budget-512x64-w1.25", 512, 64, 1.25, "lognormal", _budget(131072)),
    Cell("fixed-1024x64-w1.25", 1024, 64, 1.25, "lognormal", _fixed(1)),
    Cell("budget-1024x64-w1.25", 1024, 64, 1.25, "lognormal", _budget(131072)),
    Cell("step-1024x64-w1", 1024, 64, 1.0, "lognormal", _STEP),
    Cell("padded-1024x64-w1.25", 1024, 64, 1.25, "lognormal", _PADDED),
    Cell("fixed-4096x64-w1.25", 4096, 64, 1.25, "lognormal", _fixed(4)),
    Cell("budget-4096x64-w2", 4096, 64, 2.0, "lognormal", _budget(131072)),
    Cell("step-16384x64-w1.25", 16384, 64, 1.25, "lognormal", _fixed(256, Sync.STEP)),
    Cell("fixed-16384x64-w1.25", 16384, 64, 1.25, "lognormal", _fixed(4)),
    Cell("budget-16384x64-w1.25", 16384, 64, 1.25, "lognormal", _budget(131072)),
    Cell("deepseek-16384x8-w1", 16384, 8, 1.0, "deepseek_r1_arc_g2", _budget(32768)),
    Cell("budget-4096x512-w1.25", 4096, 512, 1.25, "lognormal", _budget(131072)),
    Cell("tiny-64x8-w1.5", 64, 8, 1.5, "lognormal", _fixed(1)),
    Cell("lineage-1024x64-w1.25", 1024, 64, 1.25, "lineage_open_reasoning", _budget(131072)),
    Cell("lineage-512x64-w1.25", 512, 64, 1.25, "lineage_open_reasoning", _budget(131072)),
    Cell("reasoning-gym-1024x64-w1.25", 1024, 64, 1.25, "reasoning_gym_rlvr_g3", _budget(16384)),
    Cell("azure-conv-1024x64-w1.25", 1024, 64, 1.25, "azure2023_conv", _budget(32768)),
)


def available(cell: Cell) -> bool:
    """Whether this cell's lengths are here: the real traces are not part of the project."""
    return cell.lengths == "lognormal" or _trace(cell.lengths).exists()


def those_here(cells: Iterable[Cell]) -> Iterator[Cell]:
    """Those whose lengths are here; of the others it is printed that they are left out."""
    for cell in cells:
        if available(cell):
            yield cell
        else:
            print(f"{cell.name:24} skipped: the trace {cell.lengths} is not here")


def stream(cell: Cell, seed: int) -> Iterator[int]:
    """Lengths without end: fresh draws, or seeded permutations of a trace's rows."""
    rng, rows = np.random.default_rng(seed), lengths_of(cell)
    while True:
        lengths = _lognormal(rng) if rows is None else rng.permutation(rows)
        yield from lengths.tolist()


def lengths_of(cell: Cell) -> IntArray | None:
    """All lengths of the trace, None where they are drawn."""
    return None if cell.lengths == "lognormal" else read_trace(_trace(cell.lengths))


def _lognormal(rng: np.random.Generator) -> IntArray:
    """Like a reasoning model's: median 8 ki tokens, cut at 64 ki."""
    return np.clip(rng.lognormal(np.log(8192), 0.8, 4096), 16, 65536).astype(np.int64)


def _trace(name: str) -> Path:
    return TRACES / f"{name}.csv.gz"


def read_trace(path: Path) -> IntArray:
    """Prompt and response tokens of every row."""
    with gzip.open(path, "rt", newline="") as file:
        rows = csv.DictReader(file)
        tokens = [int(row["prompt_tokens"]) + int(row["response_tokens"]) for row in rows]
    return np.array(tokens, np.int64)
