"""What a bound on a step's loss tokens costs in waiting, and what it leaves of weights.

    python -m tests.bench.mix [--steps 100] [--seeds 3] [--json FILE]

`dispatcher simulate` with token budgets on real traces, for a window of 1.25 and several values of
--max-step-variation, and for several windows at its default. Figures are means over seeds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean

from rollout_dispatcher.simulate.result import Run
from rollout_planner.types import Sync
from tests.bench.cells import TRACES
from tests.bench.rows import command
from tests.bench.windows import MAX_SKIPS, simulated

#: Trace, dispatch batch, DP ranks, tokens of a micro-batch's budget.
SIZES = (
    ("lineage_open_reasoning", 512, 64, 131072),
    ("lineage_open_reasoning", 1024, 64, 131072),
    ("reasoning_gym_rlvr_g3", 256, 16, 16384),
    ("reasoning_gym_rlvr_g3", 1024, 64, 16384),
    ("azure2023_conv", 1024, 64, 32768),
)
#: Windows and bounds.
CHOICES = (
    (1, "0.25"), (1.25, "off"), (1.25, "0.5"), (1.25, "0.25"), (1.25, "0.15"), (1.25, "0.1"),
    (1.1, "0.25"), (1.5, "0.25"), (2, "0.25"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One trace, window and bound; ratios, see `StepMix` and `Run`. bound: as the option has it."""

    lengths: str
    window: float
    bound: str
    excess: float
    long_weight: float
    long_weight_expected: float
    without_long: float
    work_variation: float
    ks_step: float
    mean_delay: float


def measure(steps: int, seeds: int) -> Iterator[Row]:
    """A row a trace and choice."""
    for trace, batch, ranks, budget in SIZES:
        path = TRACES / f"{trace}.csv.gz"
        if not path.exists():
            print(f"{trace} skipped: the trace is not here")
            continue
        for window, bound in CHOICES:
            runs = runs_of(
                path, batch, ranks, budget, window=window, bound=bound, steps=steps, seeds=seeds
            )
            yield _row(f"{trace} {batch}/{ranks}", window, bound, runs)


def runs_of(
    path: Path,
    batch: int,
    ranks: int,
    budget: int,
    *,
    window: float,
    bound: str,
    steps: int,
    seeds: int,
    sync: Sync = Sync.MICRO_STEP,
) -> list[Run]:
    """`dispatcher simulate` on a trace with one window and bound, a run a seed."""
    return [
        simulated(
            path, "--dp-size", ranks, "--global-batch-size", batch,
            "--micro-batch-tokens", budget, "--strategy", "window",
            "--window", window, "--max-step-variation", bound,
            "--max-delay", MAX_SKIPS, "--steps", steps, "--seed", seed, "--sync", sync,
        ).runs[0]
        for seed in range(1, seeds + 1)
    ]  # fmt: skip


def _row(lengths: str, window: float, bound: str, runs: list[Run]) -> Row:
    return Row(
        lengths,
        window,
        bound,
        excess=fmean(run.excess for run in runs),
        long_weight=fmean(run.mix.long_weight for run in runs),
        long_weight_expected=fmean(run.long_weight_expected or nan for run in runs),
        without_long=fmean(run.mix.without_long for run in runs),
        work_variation=fmean(run.mix.work_variation for run in runs),
        ks_step=fmean(run.mix.ks_step for run in runs),
        mean_delay=fmean(run.delay.mean for run in runs),
    )


def line(row: Row) -> str:
    """As it is printed."""
    return (
        f"{row.lengths:32} {row.window:5g} {row.bound:>5} {100 * row.excess:7.2f} %  weight "
        f"{row.long_weight:5.2f}, expected {row.long_weight_expected:5.2f}  none "
        f"{100 * row.without_long:5.1f} %  work {100 * row.work_variation:5.1f} %  "
        f"KS {row.ks_step:.3f}"
    )


if __name__ == "__main__":
    command(__doc__, measure, line, steps=100, seeds=3)
