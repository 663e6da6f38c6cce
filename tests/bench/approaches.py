"""Four ways to balance, on the same lengths: grouped, in buckets, greedily, and by a window.

    python -m tests.bench.approaches [--steps 60] [--json FILE]

- grouped: as Hugging Face's `group_by_length`, in mega-batches of 4 or of 16 global batches; the
  whole data set has to exist before training.
- offline: `LengthBucketSampler` over the same data, in buckets of 1, 4 or 16 global batches, or of
  all. A step of a bucket of 16 and one of a mega-batch of 4 have lengths from a quarter of these
  data, those of 4 and of 16 from a sixteenth.
- greedy: each dispatch batch as it comes, longest first onto the least loaded rank.
- window: the planner, with 1.25 and 2 dispatch batches to choose from.

Straggler excess is the ratio of sums over the steps, once for ranks that meet once a step and once
for ranks that meet at every micro-batch. The distance says how far the lengths of one step stray
from the data's (Kolmogorov-Smirnov, median): what an optimizer step sees.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np

from rollout_planner.types import FloatArray, IntArray, Strategy, Sync, straggler_excess
from rollout_workers import LengthBucketSampler
from tests.bench.cells import Cell, stream, those_here
from tests.bench.planner import WARM_UP, Totals, steady
from tests.bench.rows import report
from tests.bench.training.orders import Work, group_by_length

CELLS = (
    Cell("lognormal 1024/64", 1024, 64, 1.0, "lognormal"),
    Cell("lineage 1024/64", 1024, 64, 1.0, "lineage_open_reasoning"),
    Cell("reasoning_gym 1024/64", 1024, 64, 1.0, "reasoning_gym_rlvr_g3"),
    Cell("azure_conv 1024/64", 1024, 64, 1.0, "azure2023_conv"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; excess as a ratio."""

    lengths: str
    approach: str
    step_excess: float
    micro_step_excess: float
    distance: float


#: Samples that the offline sampler has before it starts.
DATA = 65_536


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    print(HEADING)
    report(measure(given.steps), line, given.json)


def measure(steps: int) -> Iterator[Row]:
    """A row a cell and approach."""
    for cell in those_here(CELLS):
        data = np.sort(np.fromiter(islice(stream(cell, 9), DATA), np.int64))
        for name, batches in approaches(cell, data):
            yield _row(cell, name, list(islice(batches, steps)), data)


def approaches(cell: Cell, data: IntArray) -> Iterator[tuple[str, Iterator[dict[Sync, IntArray]]]]:
    """Name of each approach, and its steps: tokens[rank, micro-batch] for either kind of sync."""
    for mega in (4, 16):
        yield f"grouped {mega}", _grouped(cell, data, mega)
    for buckets in (1, 4, 16, None):
        yield f"offline {buckets or 'all'}", _offline(cell, data, buckets)
    yield "greedy", _planned(cell, Strategy.GREEDY)
    for multiple in (1.25, 2.0):
        wide = replace(cell, window_multiple=multiple)
        yield f"window {multiple:g}", _planned(wide, Strategy.WINDOW)


def _grouped(cell: Cell, data: IntArray, mega: int) -> Iterator[dict[Sync, IntArray]]:
    for shares in group_by_length(Work(data.tolist(), cell.batch, cell.dp_size, 1, "", 0), mega):
        yield dict.fromkeys(Sync, data[np.stack(shares)])


def _offline(cell: Cell, data: IntArray, buckets: int | None) -> Iterator[dict[Sync, IntArray]]:
    size = cell.batch // cell.dp_size
    samplers = [
        LengthBucketSampler(
            data, batch_size=size, bucket_batches=buckets, dp_rank=rank, dp_size=cell.dp_size
        )
        for rank in range(cell.dp_size)
    ]
    ranks = [iter(sampler) for sampler in samplers]
    while True:
        step = np.array([list(islice(rank, size)) for rank in ranks])
        yield dict.fromkeys(Sync, data[step])


def _planned(cell: Cell, strategy: Strategy) -> Iterator[dict[Sync, IntArray]]:
    """Both kinds of sync have plans of their own, over the same lengths."""
    size = cell.batch // cell.dp_size
    by_step = {"micro_batch_size": size, "sync": Sync.STEP}
    by_micro_step = {"micro_batch_size": 1, "sync": Sync.MICRO_STEP}
    streams = [
        islice(steady(replace(cell, plan=plan), strategy, 1), WARM_UP, None)
        for plan in (by_step, by_micro_step)
    ]
    for answers in zip(*streams, strict=True):
        yield {
            sync: np.array([window.tokens[np.concatenate(rank)] for rank in plan.micro_batches])
            for sync, (window, plan) in zip((Sync.STEP, Sync.MICRO_STEP), answers, strict=True)
        }


HEADING = f"{'lengths':24} {'approach':14} {'step %':>8} {'micro-step %':>13} {'distance':>9}"


def line(row: Row) -> str:
    """A row as it is printed."""
    return (
        f"{row.lengths:24} {row.approach:14} {100 * row.step_excess:8.2f} "
        f"{100 * row.micro_step_excess:13.2f} {row.distance:9.3f}"
    )


def _row(cell: Cell, name: str, steps: list[dict[Sync, IntArray]], data: IntArray) -> Row:
    totals = {sync: Totals() for sync in Sync}
    cost = replace(cell, plan={"micro_batch_size": 1}).config(Strategy.WINDOW).cost
    for step in steps:
        for sync, tokens in step.items():
            work: FloatArray = cost(tokens.ravel()).reshape(tokens.shape)
            totals[sync].add(straggler_excess(work, sync), float(work.sum()) / len(work))
    apart = median(distance(step[Sync.STEP].ravel(), data) for step in steps)
    by_step, by_micro_step = totals[Sync.STEP].excess, totals[Sync.MICRO_STEP].excess
    return Row(cell.name, name, by_step, by_micro_step, apart)


def distance(sample: IntArray, data: IntArray) -> float:
    """Kolmogorov-Smirnov distance of a sample from sorted data."""
    ranks = np.searchsorted(data, np.sort(sample), side="right") / len(data)
    steps = np.arange(len(sample) + 1) / len(sample)
    return float(max(np.abs(ranks - steps[1:]).max(), np.abs(ranks - steps[:-1]).max()))


if __name__ == "__main__":
    main()
