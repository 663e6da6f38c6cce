"""The seams of docs/planner.md beside what they replace, on batches of real lengths.

    python -m tests.bench.seams [--batches 10] [--json FILE]

For verl: its `_balance_batch` shares samples out by Karmarkar-Karp of equal size, and each rank
cuts its own by Karmarkar-Karp into as many micro-batches as the fullest rank needs, small ones at
both ends. Ours is the code of the page. The budget is the longest sample of the trace.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollout_dispatcher.balance import Quadratic, get_seqlen_balanced_partitions
from rollout_dispatcher.plan import IntArray, Sync, step_time
from tests.bench.cells import TRACES, read_trace
from tests.bench.rows import report
from tests.support.seams import DataProto, padded, seam, select

SIZES = ((128, 8), (512, 16), (1024, 64))
NAMES = (
    "lineage_open_reasoning",
    "reasoning_gym_rlvr_g3",
    "azure2023_conv",
    "deepseek_r1_arc_g2",
    "tau_airline_agent_g4",
)
#: [dp rank][micro-batch], samples of each.
Step = list[list[list[int]]]


@dataclass(frozen=True, slots=True)
class Row:
    """One trace, size and trainer; mean excess as ratios, and how far ours was behind at worst."""

    lengths: str
    trainer: str
    verl: float
    ours: float
    furthest_behind: float


def by_verl(lengths: IntArray, ranks: int, budget: int) -> Step:
    """As verl does it."""
    work = Quadratic()(lengths).astype(np.int64)
    parts = get_seqlen_balanced_partitions(work.tolist(), ranks, equal_size=True)
    count = max(-(-int(lengths[part].sum()) // budget) for part in parts)
    step = []
    for part in parts:
        own = get_seqlen_balanced_partitions(work[part].tolist(), count, equal_size=False)
        bins = [[part[i] for i in each] for each in own]
        bins.sort(key=lambda each: -int(work[each].sum()))
        step.append(bins[::2][::-1] + bins[1::2])
    return step


def by_the_page(lengths: IntArray, ranks: int, budget: int, strategy: str) -> Step:
    """As docs/planner.md has it."""
    actor = SimpleNamespace(
        strategy=strategy, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=budget
    )
    trainer: Any = SimpleNamespace(
        _get_dp_size=lambda *_: ranks,
        actor_rollout_wg=None,
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor)),
    )
    # What counts is how many ones a row of the mask has, and which row it is.
    batch = DataProto(padded(lengths.tolist()))
    seam("_balance_batch")["_balance_batch"](trainer, batch, {})
    cut = seam("rearrange_micro_batches", index_select_tensor_dict=select)
    rows, step = batch.batch["input_ids"].amax(1).tolist(), []
    each = len(lengths) // ranks
    for first in range(0, len(lengths), each):
        own = {name: value[first : first + each] for name, value in batch.batch.items()}
        _, parts = cut["rearrange_micro_batches"](own, budget)
        step.append([[rows[first + i] for i in part] for part in parts])
    return step


def excess(step: Step, lengths: IntArray, sync: Sync) -> float:
    """Straggler excess."""
    work = Quadratic()(lengths)
    load = np.array([[float(work[part].sum()) for part in rank] for rank in step])
    return step_time(load, sync) * len(step) / float(work.sum()) - 1


def measure(batches: int) -> Iterator[Row]:
    """A row a trace, size and trainer."""
    for name in NAMES:
        path = TRACES / f"{name}.csv.gz"
        if not path.exists():
            print(f"{name} skipped: the trace is not here")
            continue
        tokens = read_trace(path)
        budget = int(tokens.max())
        for batch, ranks in SIZES:
            for strategy, sync in (("fsdp", Sync.MICRO_STEP), ("megatron", Sync.STEP)):
                rng, found = np.random.default_rng(1), []
                for _ in range(batches):
                    lengths = np.maximum(rng.choice(tokens, batch), 1)
                    step = by_the_page(lengths, ranks, budget, strategy)
                    assert sorted(i for rank in step for part in rank for i in part) == list(
                        range(batch)
                    )
                    theirs = excess(by_verl(lengths, ranks, budget), lengths, sync)
                    found.append((theirs, excess(step, lengths, sync)))
                yield Row(
                    f"{name} {batch}/{ranks}",
                    "FSDP" if strategy == "fsdp" else "Megatron",
                    fmean(verl for verl, _ in found),
                    fmean(ours for _, ours in found),
                    max(ours - verl for verl, ours in found),
                )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    report(measure(given.batches), line, given.json)


def line(row: Row) -> str:
    """As it is printed."""
    return (
        f"{row.lengths:32} {row.trainer:9} verl {100 * row.verl:7.2f} %  ours "
        f"{100 * row.ours:7.2f} %  furthest behind {100 * row.furthest_behind:6.2f}"
    )


if __name__ == "__main__":
    main()
