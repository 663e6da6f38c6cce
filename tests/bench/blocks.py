"""What giants over several ranks are worth: excess of steps with and without, over unsplit work.

    python -m tests.bench.blocks [--steps 5] [--json FILE]

Steps in order of arrival, or shuffled where a trace has none; ranks meet once a step without a
budget, or at every micro-step within one. bound: what no plan can go below: work, what is over the
budget by itself in the smallest block that has room; and the dearest sample in the largest block.
whole: bytes to ranks, over those of their slices, if all ranks of a block got the whole samples.
Figures are means over steps; the largest is of one step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median
from time import process_time

import numpy as np

from rollout_dispatcher.protocol.slices import Slicing
from rollout_planner import plan_step
from rollout_planner.split.blocks import BlockWork
from rollout_planner.types import IntArray, PlanConfig
from tests.bench.cells import TRACES, read_trace
from tests.bench.rows import command
from tests.support.blocks import COST, OVERHEAD, step_time

MOST, AMPLE = 8, 1 << 30
#: Trace, its budget of tokens for the rows that have one.
LENGTHS = (
    ("lineage_open_reasoning", 65536),
    ("reasoning_gym_rlvr_g3", 16384),
    ("azure2023_code", 16384),
    ("azure2023_conv", 16384),
    ("tau_airline_agent_g4", 65536),
)
SIZES = ((128, 16), (512, 32), (512, 64), (1024, 64))


@dataclass(frozen=True, slots=True)
class Row:
    """Excess as shares of even work; split: share of samples on several ranks; ms: of CPU."""

    lengths: str
    batch: int
    dp_size: int
    budget: int | None
    without: float
    excess: float
    largest: float
    bound: float
    split: float
    whole: float
    ms: float


def rows(steps: int) -> Iterator[Row]:
    """One for each trace that is here, size, and with and without a budget."""
    for name, budget in LENGTHS:
        path = TRACES / f"{name}.csv.gz"
        if not path.exists():
            print(f"{name} skipped: the trace is not here")
            continue
        tokens = np.random.default_rng(1).permutation(read_trace(path))
        for batch, ranks in SIZES:
            some = tokens[: min(len(tokens) // batch, steps) * batch]
            for most in (None, budget) if len(some) else ():
                yield _row(name, some, batch, ranks, most)


def _row(name: str, tokens: IntArray, batch: int, ranks: int, budget: int | None) -> Row:
    sync, room = ("step", AMPLE) if budget is None else ("micro-step", budget)
    without, excess, bounds, split, whole, took = [], [], [], [], [], []
    for lengths in tokens.reshape(-1, batch):
        even = float(COST(lengths).sum()) / ranks
        alone = plan_step(
            lengths, dp_size=ranks, micro_batch_tokens=room, sync=sync, oversize="alone"
        )
        began = process_time()
        found = plan_step(
            lengths, dp_size=ranks, micro_batch_tokens=room, sync=sync, max_split=MOST,
            split_overhead=OVERHEAD,
        )  # fmt: skip
        took.append(1e3 * (process_time() - began))
        without.append(step_time(alone, lengths, sync, AMPLE) / even - 1)
        excess.append(step_time(found, lengths, sync, room) / even - 1)
        bounds.append(_bound(lengths, ranks, room) / even - 1)
        listed = np.bincount([i for rank in found for own in rank for i in own])
        split.append(float((listed > 1).mean()))
        whole.append(float((lengths * listed).sum()) / _sent(lengths, listed))
    return Row(
        name, batch, ranks, budget, fmean(without), fmean(excess), max(excess), fmean(bounds),
        fmean(split), fmean(whole) - 1, median(took),
    )  # fmt: skip


def _sent(lengths: IntArray, ranks: IntArray) -> int:
    """Tokens that ranks are sent of samples of so many ranks each."""
    return sum(
        stop - start
        for tokens, size in zip(lengths.tolist(), ranks.tolist(), strict=True)
        for rank in range(size)
        for start, stop in Slicing.ZIGZAG.ranges(tokens, 1, rank, size)
    )


def _bound(lengths: IntArray, ranks: int, budget: int) -> float:
    config = PlanConfig(ranks, len(lengths), COST, micro_batch_tokens=budget)
    work = BlockWork(lengths, config, MOST, OVERHEAD)
    least = work.doublings(np.inf)
    all_work = (work.time[least, np.arange(len(lengths))] * (1 << least)).sum()
    return max(float(all_work) / ranks, float(work.time.min(axis=0).max()))


def _line(row: Row) -> str:
    named = f"{row.lengths:24} {row.batch:5}/{row.dp_size:<3} {row.budget or 'no budget':>9}"
    return (
        f"{named}  without {row.without:7.2%}  with {row.excess:6.2%} (largest {row.largest:6.2%}, "
        f"bound {row.bound:6.2%})  split {row.split:5.2%}, "
        f"whole {row.whole:6.1%}  {row.ms:5.1f} ms"
    )


if __name__ == "__main__":
    command(__doc__, rows, _line, steps=5)
