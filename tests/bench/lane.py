"""What the outlier lane buys, and what samples wait for it: `dispatcher simulate` with and without.

    python -m tests.bench.lane [--steps 100] [--json FILE]

One run of each, of seed 1, with token budgets and a window of 1.25.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.cells import TRACES
from tests.bench.windows import BUDGETS, MAX_SKIPS, simulated

#: Trace, dispatch batch, DP ranks.
SIZES = (
    ("lineage_open_reasoning", 512, 64),
    ("reasoning_gym_rlvr_g3", 256, 16),
    ("reasoning_gym_rlvr_g3", 1024, 64),
    ("azure2023_conv", 1024, 64),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line: excess as ratios, of all steps and the 99th percentile; delays in dispatches."""

    lengths: str
    lane: str
    excess: float
    p99_excess: float
    mean_delay: float
    p99_delay: float
    max_delay: float
    ks: float
    ks_fifo: float


def measure(steps: int) -> Iterator[Row]:
    """A row a trace, with the lane and without."""
    for trace, batch, ranks in SIZES:
        path = TRACES / f"{trace}.csv.gz"
        if not path.exists():
            print(f"{trace} skipped: the trace is not here")
            continue
        for lane, flag in (("on", "--outlier-lane"), ("off", "--no-outlier-lane")):
            (run,) = simulated(
                path, "--dp-size", ranks, "--dispatch-batch-size", batch, "--micro-batch-tokens",
                BUDGETS[trace], "--strategy", "window", "--window-multiple", 1.25, "--max-skips",
                MAX_SKIPS, "--steps", steps, "--seed", 1, flag,
            ).runs  # fmt: skip
            delay = run.delay
            yield Row(
                f"{trace} {batch}/{ranks}", lane, run.excess, run.step_excess.p99,
                delay.mean, delay.p99, delay.max, run.ks, run.ks_fifo,
            )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    rows = []
    for row in measure(given.steps):
        rows.append(asdict(row))
        print(row, flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
