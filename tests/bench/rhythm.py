"""What columns in a perfect rhythm would wait: the estimate in docs/balance.md, for each trace.

    python -m tests.bench.rhythm

Ranks meet at every micro-step, one sample in each. Every length gathers for w dispatches and leaves
in full columns of R, which are half empty on average where they cross a cost; an arrival waits
(w - 1) / 2 dispatches, of which there are W - 1 on average. Where few samples cost more, a column
goes when its first sample is due. An estimate, not a bound: no plan is made.
"""

import numpy as np

from rollout_dispatcher.balance.cost.models import Quadratic
from rollout_dispatcher.plan import FloatArray, IntArray
from tests.bench.cells import TRACES, read_trace

#: Dispatches that may pass a sample over.
MAX_SKIPS = 8
TRACE_NAMES = ("lineage_open_reasoning", "reasoning_gym_rlvr_g3", "azure2023_conv")


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
    for name in TRACE_NAMES:
        path = TRACES / f"{name}.csv.gz"
        if not path.exists():
            print(f"{name} skipped: the trace is not here")
            continue
        tokens = read_trace(path)
        for ranks, batch in ((16, 256), (64, 1024), (64, 512)):
            excess = [100 * rhythm_excess(tokens, ranks, batch, window) for window in (1, 1.25, 2)]
            print(f"{name:24} {batch}/{ranks}  " + " / ".join(f"{each:.1f}" for each in excess))


if __name__ == "__main__":
    main()
