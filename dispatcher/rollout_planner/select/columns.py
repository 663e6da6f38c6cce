"""The column DP: which samples of the window form the tightest micro-steps.

Invariant: the answer keeps exactly `take` items.

Sorted by falling cost, a column of G neighbours costs G * largest - sum in waiting. The program
walks the columns from the heavy end; its state is how many items were skipped so far. Skipping an
item costs its penalty, which grows with age. Skips stay within a band around their share, and the
square of how far they lead or lag it has a price, so that the lengths that leave follow the lengths
that arrived. Light columns waste little: they are taken in runs, the longer the lighter.

Example: costs 9 5 5 1 1, take 4, G = 2: [9 5][5 1] wastes 8, skipping the 9 gives [5 5][1 1] and
wastes nothing.
"""

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import running_sums
from rollout_planner.types import FloatArray, IntArray


def tightest(
    x: FloatArray, penalty: FloatArray, take: int, G: int, price: float | None = None
) -> IntArray:
    """Which of the items of falling cost `x` to keep, int64[take], rising.

    penalty: cost of skipping each item. price: of skips that are all ahead of their share, or all
    behind (default: `tuning.SKIPS`): a multiple of what the window would wait if all of it left in
    columns, as little should be paid where little can be saved.
    """
    N = len(x)
    E, columns = N - take, -(-take // G)
    skipped = np.unique(np.linspace(0, E, min(E, tuning.STATES) + 1).astype(np.int64))
    ends = (1 + np.arange(columns) // tuning.SINGLE_COLUMNS).cumsum()
    ends = G * np.append(0, np.unique(np.minimum(ends, columns)))
    taken = np.minimum(ends, take)
    heads, sums = _strided_sums(x, G, N + G), running_sums(x + penalty)
    begun = G * heads[skipped + ends[:, None]] - sums[skipped + taken[:, None]]
    waits, work = G * float(x[::G].sum()) - float(x.sum()), float(x.sum())
    price = tuning.SKIPS if price is None else price
    price *= max(waits, tuning.GOOD_ENOUGH * work) / (max(N * E, 1) * len(ends))
    ahead = skipped - E * taken[:, None] / take
    band = max(tuning.BAND * N, float(np.diff(taken).max()) * E / take) + 2
    led = np.where(np.abs(ahead) > band, np.inf, price * ahead**2)
    costs, best = np.diff(begun, axis=0) + led[1:], led[0]
    for run in costs:
        np.add(run, best, run)
        best = np.minimum.accumulate(run)
    states, state = [], len(best) - 1
    for run in costs[::-1]:
        state = int(run[: state + 1].argmin())
        states.append(state)
    kept: IntArray = np.arange(take) + skipped[states[::-1]].repeat(np.diff(taken))
    return kept


def _strided_sums(x: FloatArray, G: int, end: int) -> FloatArray:
    """H[i] = x[i-G] + x[i-2G] + ... for i below `end`, as if zeros followed.

    So the first items of the columns from item i to j, whole columns later, sum up to H[j] - H[i].
    """
    padded = np.zeros((-(-end // G) + 1) * G)
    padded[G : G + len(x)] = x
    return padded.reshape(-1, G).cumsum(axis=0).ravel()
