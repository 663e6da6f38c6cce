"""What a window gives, and what holds samples back costs: `dispatcher simulate` on real traces.

    python -m tests.bench.windows [--steps 100] [--seeds 3] [--json FILE]

For each trace and size, windows of 1, 1.25 and 2, and ranks that meet at every micro-step of a
token budget, once a step, or at every micro-step of single samples; steps may have as many loss
tokens as balances best (`tests.bench.mix` has what a bound on them costs). Figures are medians over
seeds: straggler excess, and the Kolmogorov-Smirnov distance of the lengths of 20 dispatches, of
what left and of what arrived (`ks`, `ks_fifo`).
"""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from rollout_dispatcher.cli.main import main as dispatcher
from rollout_dispatcher.simulate.result import Result
from tests.bench.cells import TRACES
from tests.bench.rows import command
from tests.support.simulated import result_of

MAX_SKIPS = 8
#: Dispatch batch and DP ranks, by trace.
TRACES_AND_SIZES = {
    "lineage_open_reasoning": ((256, 16), (1024, 64), (512, 64)),
    "reasoning_gym_rlvr_g3": ((256, 16), (1024, 64)),
    "azure2023_conv": ((1024, 64),),
}
WINDOWS = (1.0, 1.25, 2.0)
#: Tokens of a micro-batch's budget, by trace; steps for each hundred asked for.
BUDGETS = {
    "lineage_open_reasoning": 131072,
    "reasoning_gym_rlvr_g3": 16384,
    "azure2023_conv": 32768,
}
LONGER = {"reasoning_gym_rlvr_g3": 2}


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
    return result_of(printed.getvalue())


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
                "--max-step-variation", "off", "--steps", steps, "--seed", seed, *options,
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


def measure_all(steps: int, seeds: int) -> Iterator[Row]:
    """Of each trace that is here; of rare outliers longer runs."""
    for trace, sizes in TRACES_AND_SIZES.items():
        if not (TRACES / f"{trace}.csv.gz").exists():
            print(f"{trace} skipped: the trace is not here")
            continue
        for batch, ranks in sizes:
            yield from measure(trace, batch, ranks, seeds, steps * LONGER.get(trace, 1))


def line(row: Row) -> str:
    """A row as it is printed."""
    return (
        f"{row.lengths:32} {row.meet:12} {row.window:5g} {100 * row.excess:7.2f} % "
        f"{row.ks_ratio:5.2f} of FIFO's distance"
    )


if __name__ == "__main__":
    command(__doc__, measure_all, line, steps=100, seeds=3)
