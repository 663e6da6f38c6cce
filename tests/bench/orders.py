"""The order of micro-batches: what an allocator reserves, and what a pipeline takes.

    python -m tests.bench.orders [--steps 40] [--json FILE]

*Reserved* is what a rank's allocator has asked for after a step if it keeps every block, and none
fits a micro-batch that is larger than all before it: the sum of the tokens of each new largest
micro-batch, over the largest one's; the mean over ranks and steps.

A pipeline runs 1F1B on a clock (tests/support/pipeline.py); printed is the time of the slowest DP
rank's, over the work of one stage, as the ratio of sums over the steps. *one stage* is planned and
ordered without knowing of stages, *stages* knows them and keeps that order, *small ends* orders for
them too. Windows are refilled before each dispatch.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rollout_planner.types import (
    FloatArray,
    IntArray,
    MicroBatchOrder,
    Plan,
    Strategy,
    Sync,
    Window,
)
from tests.bench.cells import Cell, available
from tests.bench.planner import WARM_UP, steady
from tests.support.pipeline import step_time


@dataclass(frozen=True, slots=True)
class Memory:
    """Tokens reserved over the largest micro-batch's, by order."""

    lengths: str
    sync: str
    strategy: str
    as_planned: float
    peak_first: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Time of a step over the work of one stage, by what the plan knows."""

    lengths: str
    stages: int
    window: float
    one_stage: float
    known_stages: float
    small_ends: float


LINEAGE, REASONING = "lineage_open_reasoning", "reasoning_gym_rlvr_g3"
_FORMS: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("lineage budget", LINEAGE, 256, 8, {"micro_batch_tokens": 65536}),
    ("lineage 4 each", LINEAGE, 256, 8, {"micro_batch_size": 4}),
    ("reasoning_gym budget", REASONING, 512, 8, {"micro_batch_tokens": 16384}),
    ("reasoning_gym 8 each", REASONING, 512, 8, {"micro_batch_size": 8}),
    ("azure_conv budget", "azure2023_conv", 1024, 16, {"micro_batch_tokens": 16384}),
)
_FIRST, _ENDS, _PLANNED = (
    MicroBatchOrder.PEAK_FIRST,
    MicroBatchOrder.ENDS_SMALL,
    MicroBatchOrder.AS_PLANNED,
)


def reserved(tokens: FloatArray | IntArray) -> float:
    """New largest ones of tokens[R, M] in turn, over the largest of a rank; the mean of ranks."""
    highest = np.maximum.accumulate(tokens, axis=1)
    new = np.diff(highest, axis=1, prepend=0) > 0
    return float(np.mean((tokens * new).sum(axis=1) / highest[:, -1]))


def plans(cell: Cell, strategy: Strategy, steps: int, **plan: Any) -> list[tuple[Window, Plan]]:
    """The steady state of a cell, planned with these settings besides."""
    made = steady(replace(cell, plan=cell.plan | plan), strategy, 1)
    return list(islice(made, WARM_UP, WARM_UP + steps))


def memory(cell: Cell, sync: Sync, strategy: Strategy, steps: int) -> Memory:
    """One row."""
    shares = []
    for order in (_PLANNED, _FIRST):
        found = []
        for window, made in plans(cell, strategy, steps, sync=sync, micro_batch_order=order):
            tokens = [[window.tokens[part].sum() for part in rank] for rank in made.micro_batches]
            found.append(reserved(np.maximum(tokens, 1)))
        shares.append(float(np.mean(found)))
    return Memory(cell.name, str(sync), str(strategy), *shares)


def pipeline(cell: Cell, stages: int, steps: int) -> Pipeline:
    """One row."""
    ways = ((1, _PLANNED), (stages, _PLANNED), (stages, _ENDS))
    found = []
    for known, order in ways:
        time = work = 0.0
        settings = {"pipeline_stages": known, "micro_batch_order": order}
        for _, made in plans(cell, Strategy.WINDOW, steps, sync=Sync.STEP, **settings):
            time += max(step_time(rank, stages) for rank in made.cost.tolist())
            work += float(made.cost.sum()) / len(made.cost)
        found.append(time / work)
    return Pipeline(cell.name, stages, cell.window_multiple, *found)


def cells(window: float) -> list[Cell]:
    """Those whose lengths are here."""
    made = (Cell(name, B, R, window, lengths, plan) for name, lengths, B, R, plan in _FORMS)
    return [cell for cell in made if available(cell)]


HEADINGS = (
    f"{'lengths':22} {'ranks meet at':14} {'strategy':12} {'as planned':>10} {'peak first':>10}",
    "lengths                stages window  one stage   stages  small ends",
)


def line(row: Memory | Pipeline) -> str:
    """A row as it is printed."""
    if isinstance(row, Memory):
        head = f"{row.lengths:22} {row.sync:14} {row.strategy:12}"
        return f"{head} {row.as_planned:10.2f} {row.peak_first:10.2f}"
    head = f"{row.lengths:22} {row.stages:6} {row.window:6g}"
    return f"{head} {row.one_stage:10.2f} {row.known_stages:8.2f} {row.small_ends:11.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    found: dict[str, list[Memory | Pipeline]] = {"memory": [], "pipelines": []}
    print(HEADINGS[0])
    for cell in cells(1.25):
        for sync in Sync:
            for strategy in (Strategy.ROUND_ROBIN, Strategy.WINDOW):
                found["memory"].append(memory(cell, sync, strategy, given.steps))
                print(line(found["memory"][-1]), flush=True)
    print(HEADINGS[1])
    for window in (1.0, 1.5):
        for cell in cells(window):
            for stages in (4, 8):
                found["pipelines"].append(pipeline(cell, stages, given.steps))
                print(line(found["pipelines"][-1]), flush=True)
    if given.json is not None:
        rows = {name: [asdict(row) for row in part] for name, part in found.items()}
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
