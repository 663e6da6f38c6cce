"""What a window gives, and what holds samples back costs: `dispatcher simulate` on real traces.

    python -m tests.bench.windows [--steps 100] [--seeds 3] [--json FILE]

For each trace and size, windows of 1, 1.25 and 2, and ranks that meet at every micro-step of a
token budget, once a step, or at every micro-step of single samples. Figures are medians over seeds:
straggler excess, and the Kolmogorov-Smirnov distance of the lengths of 20 dispatches, of what left
and of what arrived (`ks`, `ks_fifo`). `drawn` is that distance if each length is drawn from the
trace independently, the mean of 20 runs.
"""

import argparse
import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from rollout_dispatcher.cli.main import main as dispatcher
from rollout_dispatcher.simulate.figures import DISPATCHES, selection_bias
from rollout_dispatcher.simulate.result import Result
from rollout_planner.types import IntArray
from tests.bench.cells import TRACES, read_trace
from tests.bench.rhythm import TRACES_AND_SIZES, WINDOWS

MAX_SKIPS = 8
#: Tokens of a micro-batch's budget, by trace; steps for each hundred asked for.
BUDGETS = {
    "lineage_open_reasoning": 131072,
    "reasoning_gym_rlvr_g3": 16384,
    "azure2023_conv": 32768,
}
LONGER = {"reasoning_gym_rlvr_g3": 2}
DRAWS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One trace and size, one way to meet, one window; excess as a ratio."""

    lengths: str
    meet: str
    window: float
    excess: float
    bound: float
    ks: float
    ks_fifo: float
    ks_ratio: float


def simulated(*words: object) -> Result:
    """What `dispatcher simulate` with these words finds."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = dispatcher(["simulate", *map(str, words), "--json"])
    assert code == 0, f"dispatcher simulate {words} ended with {code}"
    return Result.from_json(printed.getvalue())


def ways(trace: str) -> dict[str, tuple[object, ...]]:
    """How ranks meet, as options."""
    return {
        "token budget": ("--micro-batch-tokens", BUDGETS[trace]),
        "step": ("--micro-batch-size", 1, "--sync", "step"),
        "micro-step": ("--micro-batch-size", 1, "--sync", "micro-step"),
    }


def measure(trace: str, batch: int, ranks: int, seeds: int, steps: int) -> Iterator[Row]:
    """All ways and windows of a trace and size."""
    for meet, options in ways(trace).items():
        results = [
            simulated(
                TRACES / f"{trace}.csv.gz", "--dp-size", ranks, "--global-batch-size", batch,
                "--strategy", "window", "--window", *WINDOWS, "--max-delay", MAX_SKIPS,
                "--steps", steps, "--seed", seed, *options,
            ).runs
            for seed in range(1, seeds + 1)
        ]  # fmt: skip
        for runs in zip(*results, strict=True):
            yield Row(
                lengths=f"{trace} {batch}/{ranks}",
                meet=meet,
                window=runs[0].window,
                excess=median(run.excess for run in runs),
                bound=median(run.lower_bound for run in runs),
                ks=median(run.ks for run in runs),
                ks_fifo=median(run.ks_fifo for run in runs),
                ks_ratio=median(run.ks / run.ks_fifo for run in runs),
            )


def drawn(tokens: IntArray, batch: int, steps: int) -> float:
    """The distance of independent draws, over as many steps."""
    generator = np.random.default_rng(1)
    runs = []
    for _ in range(DRAWS):
        left = generator.choice(tokens, (max(steps, DISPATCHES), batch))
        runs.append(selection_bias(tokens, list(left), left.ravel(), 0)[0])
    return fmean(runs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100, help="twice as many for reasoning_gym")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    rows: list[Row] = []
    by_chance: dict[str, float] = {}
    for trace, sizes in TRACES_AND_SIZES.items():
        path = TRACES / f"{trace}.csv.gz"
        if not path.exists():
            print(f"{trace} skipped: the trace is not here")
            continue
        steps = given.steps * LONGER.get(trace, 1)
        for batch, ranks in sizes:
            by_chance[f"{trace} {batch}/{ranks}"] = drawn(read_trace(path), batch, steps)
            for row in measure(trace, batch, ranks, given.seeds, steps):
                rows.append(row)
                print(line(row), flush=True)
    if given.json is not None:
        found = {"rows": [asdict(row) for row in rows], "drawn": by_chance}
        given.json.write_text(json.dumps(found, indent=2) + "\n")


def line(row: Row) -> str:
    """A row as it is printed."""
    return (
        f"{row.lengths:32} {row.meet:12} {row.window:5g} {100 * row.excess:7.2f} % "
        f"{row.ks_ratio:5.2f} of FIFO's distance"
    )


if __name__ == "__main__":
    main()
