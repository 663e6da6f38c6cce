"""What columns in a perfect rhythm would wait: an estimate for each trace.

    python -m tests.bench.rhythm [--json FILE]

Ranks meet at every micro-step, one sample in each. Every length gathers for w dispatches and leaves
in full columns of R, which are half empty on average where they cross a cost; an arrival waits
(w - 1) / 2 dispatches, of which there are W - 1 on average. Where few samples cost more, a column
goes when its first sample is due. An estimate, not a bound: no plan is made.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from rollout_planner.cost import Quadratic
from rollout_planner.types import FloatArray, IntArray
from tests.bench.cells import TRACES, read_trace

#: Dispatches that may pass a sample over.
MAX_SKIPS = 8
#: Dispatch batch and DP ranks, by trace.
TRACES_AND_SIZES = {
    "lineage_open_reasoning": ((256, 16), (1024, 64), (512, 64)),
    "reasoning_gym_rlvr_g3": ((256, 16), (1024, 64)),
    "azure2023_conv": ((1024, 64),),
}
WINDOWS = (1.0, 1.25, 2.0)


def rhythm_excess(tokens: IntArray, ranks: int, batch: int, window: float) -> float:
    """Straggler excess of steps of `batch` of these samples over `ranks`; window: in batches."""
    x = Quadratic()(np.sort(tokens)[::-1])
    gap = x - np.append(x[1:], x[-1])  # cost between an item and the next
    above = np.arange(1.0, len(x) + 1)
    above *= batch / len(x)  # arrivals a step that cost more than the gap
    waste = ranks / 2 / _waiting_times(gap, window, len(x)) * np.minimum(above, 1)
    return float((gap * np.maximum(waste, _alone(above, ranks, window))).sum() / (x.mean() * batch))


def _alone(above: FloatArray, ranks: int, window: float) -> FloatArray:
    """Empty places a step where what costs more does not fill a column until its first is due."""
    if window <= 1:
        return (1 - np.exp(-above)) * ranks - above
    return above * (ranks - 1 - MAX_SKIPS * above) / (1 + MAX_SKIPS * above)


def _waiting_times(gap: FloatArray, window: float, n: int) -> FloatArray:
    """Dispatches for which neighbours gather: ~ sqrt(gap), of mean 1 + 2 (window - 1)."""
    low, high = 0.0, 1e9
    for _ in range(100):
        scale = (low + high) / 2
        times: FloatArray = np.clip(scale * np.sqrt(gap / max(gap.max(), 1)), 1, MAX_SKIPS + 1)
        low, high = (scale, high) if (times - 1).sum() < 2 * (window - 1) * n else (low, scale)
    return times


def main() -> None:
    """Print a line for each trace that is here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    found = []
    for name, sizes in TRACES_AND_SIZES.items():
        path = TRACES / f"{name}.csv.gz"
        if not path.exists():
            print(f"{name} skipped: the trace is not here")
            continue
        tokens = read_trace(path)
        for batch, ranks in sizes:
            excess = [rhythm_excess(tokens, ranks, batch, window) for window in WINDOWS]
            found.append({"lengths": f"{name} {batch}/{ranks}", "excess": excess})
            print(f"{found[-1]['lengths']:32}  " + " / ".join(f"{100 * x:.1f}" for x in excess))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
