"""Where padded runs end: a program over the items of many ranks at once, each by itself.

Invariant: every rank has its items in as many runs as asked for, none empty unless it has fewer
items; then the first of them have one item each.

The best j runs from an item on are one that begins there and the best j - 1 from where it ends. A
table says what each run costs. Tables of all ranks lie side by side, so that many ranks take
hardly longer than one.
"""

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.plan import FloatArray, IntArray


def least_runs(
    table: FloatArray, sizes: IntArray, M: int, pace: FloatArray | None = None
) -> tuple[IntArray, FloatArray]:
    """Items of each run, int64[ranks, M], and its cost, float64[ranks, M].

    Of ranks whose items so many runs do not hold, fewer items.

    table: float64[width, ranks, most of a rank], cost of a run of j + 1 items that begins at i; inf
    where none may. sizes: int64[ranks], items of each. pace: float64[ranks, M], what others take in
    each micro-step; below that it hardly matters what a run costs. None: what counts is the sum.
    """
    width, R, n = table.shape
    own = tuning.RECUT_OWN * table if pace is not None else table
    rest = np.full((M, R, n + width + 1), np.inf)  # least from each item on with runs from j + 1 on
    rest[M - 1, np.arange(R), sizes] = 0.0
    total, fewest = np.empty_like(table), int(sizes.min())
    for j in range(M - 1, 0, -1):
        np.add(own, _shifted(rest[j], width, n), out=total)
        if pace is not None:
            total += np.maximum(table, pace[:, j, None])
        np.minimum.reduce(total, axis=0, out=rest[j - 1, :, :n])
        if fewest <= j:  # the later runs of some are empty
            few = sizes <= j
            rest[j - 1, few] = rest[j, few]
    return _walk(table, sizes, rest, pace)


def _shifted(rest: FloatArray, width: int, n: int) -> FloatArray:
    """The first n columns that are 1, 2, ... places further on, float64[width, rows, n]; a view."""
    by_row, by_column = rest.strides
    shape, strides = (width, len(rest), n), (by_column, by_row, by_column)
    return np.ndarray(shape, rest.dtype, rest, by_column, strides)


def _walk(
    table: FloatArray, sizes: IntArray, rest: FloatArray, pace: FloatArray | None
) -> tuple[IntArray, FloatArray]:
    """From the first item of each rank to its last. rest: what is least from each item on."""
    (width, R, n), M, rows = table.shape, len(rest), np.arange(table.shape[1])
    step, ends = np.arange(1, width + 1)[:, None], np.zeros((M + 1, R), dtype=np.int64)
    for j in range(M):
        at = ends[j]
        total = table[:, rows, np.minimum(at, n - 1)]
        if pace is not None:
            total = np.maximum(total, pace[:, j]) + tuning.RECUT_OWN * total
        total += rest[j, rows, at + step]
        np.minimum(at + 1 + total.argmin(axis=0), sizes, out=ends[j + 1])
    counts = np.diff(ends, axis=0).T
    run = table[counts.T - 1, rows, np.minimum(ends[:-1], n - 1)].T
    return counts, np.where(counts > 0, run, 0.0)
