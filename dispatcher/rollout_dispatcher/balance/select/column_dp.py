"""The column DP: which samples of the window form the tightest micro-steps.

Invariant: the answer keeps exactly `take` items, all of `forced` among them, and at any point of
the sorted window what is skipped so far stays within a band around its share, so that the
lengths that leave follow the lengths that arrived. Inside the band the square of the distance has
a price: what is held then looks much the same after every step, and only what changes between
the start and the end of a stretch of steps biases what left in it.

Sorted by falling cost, a column of G neighbours costs G * largest - sum in waiting. The program
walks the columns from the heavy end; its state is how many items were skipped so far. Skipping
an item costs its penalty, which grows with age. Light columns waste little, so they are taken in
runs of 2, 4, 8, ... columns; skips come in quanta so that there are at most 1024 states.

Example: costs 9 5 5 1 1, take 4, G = 2: [9 5][5 1] wastes 8, skipping the 9 gives
[5 5][1 1] and wastes nothing.
"""

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.order import running_sums
from rollout_dispatcher.plan import BoolArray, FloatArray, IntArray


def column_dp(
    x: FloatArray,
    penalty: FloatArray,
    forced: BoolArray,
    *,
    take: int,
    G: int,
    band: float,
    price: float,
) -> BoolArray:
    """Mask of the items to keep; all arrays by falling `x`.

    penalty: cost of skipping each item. band: the share of the window by which skips may lead or
    lag. price: of skips that are all ahead of their share, or all behind, if as many are skipped as
    are taken: a multiple of what the window would wait if all of it left in columns, as little
    should be paid where little can be saved. Forced items that the band left out replace their
    nearest neighbours that are not forced.
    """
    N = len(x)
    keep = np.ones(N, dtype=bool)
    if take >= N:
        return keep
    quantum = -(-(N - take) // tuning.STATES)
    surplus = (N - take) % quantum  # skips that do not fill a quantum: the cheapest penalties
    if surplus:
        free = np.flatnonzero(~forced)
        keep[free[np.argsort(penalty[free], kind="stable")[:surplus]]] = False
    live = np.flatnonzero(keep)
    keep[live] = _solve(x[live], penalty[live], take=take, G=G, band=band, price=price, q=quantum)
    return _repair(keep, forced)


def _solve(
    x: FloatArray,
    penalty: FloatArray,
    *,
    take: int,
    G: int,
    band: float,
    price: float,
    q: int,
) -> BoolArray:
    N = len(x)
    E, K = N - take, (N - take) // q
    columns = _run_sizes(take, G, E, band * N)
    taken = np.minimum(running_sums(np.array(columns)) * G, take)  # before each run, and at the end
    skipped = np.arange(K + 1) * q
    at = skipped + taken[:, None]  # where each run begins in each state, and where the last ends
    suffix = _strided_suffix(x, G)
    dearer = _dearer(x, penalty, suffix, at, G)
    waits, work = G * float(suffix[0]) - float(x.sum()), float(x.sum())
    price *= max(waits, tuning.LEAST_WAITS * work) / (N * len(columns) * E)
    slack = max(band * N, 1.1 * E * max(columns) * G / take) + q + 2
    ahead = skipped - (E * taken[1:-1] / take)[:, None]
    led = price * ahead * ahead
    np.abs(ahead, out=ahead)
    np.putmask(led, ahead > slack, np.inf)
    dearer[:-1] += led
    best, tables = np.where(skipped > slack, np.inf, 0.0), dearer
    for table in tables:
        np.add(table, best, out=table)
        np.minimum.accumulate(table, out=best)
    return _backtrack(tables, taken, q)


def _dearer(
    x: FloatArray, penalty: FloatArray, suffix: FloatArray, at: IntArray, G: int
) -> FloatArray:
    """What each run adds in each state: what its columns wait, less the penalties passed over.

    Its columns wait G times the sum of their first items, less all of them. As penalties are summed
    up from the heavy end, and states are so many skips, what a run does not skip is taken off what
    all before it would cost.
    """
    sums = running_sums(x + penalty)
    value = sums + G * suffix[: len(sums)]
    begun = value.take(at)
    dearer: FloatArray = begun[:-1] - begun[1:]
    last = int(at[-1, 0] - at[-2, 0])
    if last % G:  # its last column is not full
        heads = G * x[at[-2, :, None] + np.arange(0, last, G)].sum(axis=1)
        dearer[-1] = heads + sums[at[-2]] - sums[at[-1]]
    return dearer


def _run_sizes(take: int, G: int, E: int, band_items: float) -> list[int]:
    """Columns in each run from the heavy end; runs stop growing where they would burst the band."""
    left = -(-take // G)
    sizes: list[int] = []
    size, repeats = 1, tuning.SINGLE_COLUMNS
    while left > 0:
        for _ in range(repeats):
            if left <= 0:
                break
            sizes.append(min(size, left))
            left -= sizes[-1]
        if 1.1 * E * 2 * size * G <= band_items * take:
            size *= 2
        repeats = tuning.RUNS_OF_A_SIZE
    return sizes


def _strided_suffix(x: FloatArray, G: int) -> FloatArray:
    """Z[i] = x[i] + x[i+G] + x[i+2G] + ..., with zeros beyond the end."""
    N = len(x)
    rows = -(-N // G) + 1
    padded = np.zeros(rows * G)
    padded[:N] = x
    suffix: FloatArray = np.cumsum(padded.reshape(rows, G)[::-1], axis=0)[::-1].reshape(-1)
    return suffix


def _backtrack(tables: FloatArray, taken: IntArray, q: int) -> BoolArray:
    state = tables.shape[1] - 1
    keep = np.zeros(taken[-1] + state * q, dtype=bool)
    ends = taken.tolist()
    for run in range(len(tables) - 1, -1, -1):
        state = int(tables[run, : state + 1].argmin())
        keep[ends[run] + state * q : ends[run + 1] + state * q] = True
    return keep


def _repair(keep: BoolArray, forced: BoolArray) -> BoolArray:
    """Each forced item that was skipped takes the place of the nearest one that is free."""
    for i in np.flatnonzero(forced & ~keep).tolist():
        free = np.flatnonzero(keep & ~forced)
        if not len(free):
            break
        keep[free[np.argmin(np.abs(free - i))]] = False
        keep[i] = True
    return keep
