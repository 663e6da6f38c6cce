"""Lower bounds: the time that no split of these samples over these ranks can beat.

Invariant: a bound never exceeds the time of any legal split. `x` is always cost in descending
order; the bounds are the mean rank, the largest sample with the smallest company it can have,
the pigeonholes (of k * R + 1 samples k + 1 share a rank), the crowd (of the k largest each has a
rank to itself, and then they share the smallest company there is, or two of them share one), and,
where micro-batches have a fixed size, the sorted columns: the j-th most expensive micro-step
holds at most R*m samples, so it costs at least what the (j*R*m)-th largest sample costs.

Dell'Amico & Martello 1995 discuss the first three of them. Example: x = [9, 3, 2, 2], R = 2, two
samples a rank: mean 8, largest with smallest company 9 + 2 = 11, pair 3 + 2 = 5; bound 11.
"""

import numpy as np

from rollout_planner.order import running_sums
from rollout_planner.types import FloatArray


def rank_bound(x: FloatArray, R: int, p: int | None = None) -> float:
    """Bound on the largest rank's sum; `p` is the exact count a rank where it is fixed."""
    if not len(x):
        return 0.0
    bound = max(float(np.add.reduce(x)) / R, x.item(0))
    if len(x) > R:
        bound = max(bound, pigeonhole_bound(x, R))
    if p is not None and len(x) == R * p:
        bound = max(bound, float(x[0] + x[len(x) - p + 1 :].sum()))
        if p > 1 and R > 1:
            bound = max(bound, _crowd(x, R, p))
    return bound


def pigeonhole_bound(x: FloatArray, R: int) -> float:
    """Of the k * R + 1 largest some rank has k + 1, which sum up to the smallest of them at least.

    Example: of 193 items of 10 and some of 1 on 64 ranks one has four of 10.
    """
    sums, k = running_sums(x), np.arange(1, (len(x) - 1) // R + 1)
    last = k * R + 1
    return float(np.maximum.reduce(sums[last] - sums[last - k - 1], initial=0.0))


def _crowd(x: FloatArray, R: int, p: int) -> float:
    """The k largest apart, with the k*(p-1) smallest on the k ranks, or two of them together."""
    k = np.arange(2, R + 1)
    sums = running_sums(x)
    apart = (sums[k] + sums[-1] - sums[len(x) - k * (p - 1)]) / k
    together = x[k - 2] + x[k - 1] + sums[-1] - sums[len(x) - p + 2]
    return float(np.minimum(apart, together).max())


def column_bound(x: FloatArray, R: int, m: int, padded: bool = False) -> float:
    """Bound on the sum over micro-steps of the largest micro-batch, m samples in each at most.

    With `padded` every sample of a micro-batch costs what the longest does, and all are full.
    """
    columns = float(np.add.reduce(x[:: R * m])) * (m if padded else 1)
    return max(columns, rank_bound(x, R))


def levels(x: FloatArray, R: int, M: int, company: float = 0.0) -> FloatArray:
    """What each of M micro-steps should cost a rank, descending, so that they sum to the least.

    A micro-step costs at least its largest sample and the `company` that this sample must have;
    what is left is spread evenly over the micro-steps that follow.
    Example: x = [10, 4, 4, 2], R = 2, M = 2: the first costs 10, so 0 is left for the second,
    which still holds a 4: levels [10, 4].
    """
    left = float(x.sum())
    out = np.empty(M)
    for j in range(M):
        largest = float(x[j * R]) + company if j * R < len(x) else 0.0
        out[j] = max(largest, left / (R * (M - j)))
        left = max(left - R * out[j], 0.0)
    return out
