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

from dispatcher.balance.order import running_sums
from dispatcher.plan import BoolArray, FloatArray, IntArray

_STATES = 1024
#: Columns taken one by one from the heavy end before runs grow; then this many runs of each size.
_SINGLE_COLUMNS, _RUNS = 32, 4
#: The window counts as waiting for this share of its work at least: alike samples wait for nobody
#: and are to be spread all the same.
_LEAST_WAITS = 1 / 128


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
    quantum = -(-(N - take) // _STATES)
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
    skipped = np.arange(K + 1) * q
    runs = _run_sizes(take, G, E, band * N)
    slack = max(band * N, 1.1 * E * max(runs) * G / take) + q + 2
    P = running_sums(penalty)
    S = running_sums(x)
    Z = _strided_suffix(x, G)
    best = P[skipped]
    best[skipped > slack] = np.inf
    waits, work = G * float(Z[0]) - float(S[N]), float(S[N])
    price *= max(waits, _LEAST_WAITS * work) / (N * len(runs) * E)
    taken, tables = 0, []
    for g in runs:
        n = min(g * G, take - taken)
        i = skipped + taken
        waste = G * (Z[i] - Z[np.minimum(i + g * G, N)]) if n == g * G else G * _heads(x, i, n, G)
        table = best + waste - (S[i + n] - S[i]) - P[i + n]
        taken += n
        if taken < take:
            ahead = skipped - E * taken / take
            table += price * ahead * ahead
            table[np.abs(ahead) > slack] = np.inf
        tables.append((table, n))
        best = np.minimum.accumulate(table) + P[skipped + taken]
    return _backtrack(tables, N, take, q)


def _run_sizes(take: int, G: int, E: int, band_items: float) -> list[int]:
    """Columns in each run from the heavy end; runs stop growing where they would burst the band."""
    left = -(-take // G)
    sizes: list[int] = []
    size, repeats = 1, _SINGLE_COLUMNS
    while left > 0:
        for _ in range(repeats):
            if left <= 0:
                break
            sizes.append(min(size, left))
            left -= sizes[-1]
        if 1.1 * E * 2 * size * G <= band_items * take:
            size *= 2
        repeats = _RUNS
    return sizes


def _strided_suffix(x: FloatArray, G: int) -> FloatArray:
    """Z[i] = x[i] + x[i+G] + x[i+2G] + ..., with zeros beyond the end."""
    N = len(x)
    rows = -(-N // G) + 1
    padded = np.zeros(rows * G)
    padded[:N] = x
    suffix: FloatArray = np.cumsum(padded.reshape(rows, G)[::-1], axis=0)[::-1].reshape(-1)
    return suffix


def _heads(x: FloatArray, i: IntArray, n: int, G: int) -> FloatArray:
    """Sum of the first items of the columns in x[i : i+n], where the last column is not full."""
    heads: FloatArray = x[i[:, None] + np.arange(0, n, G)].sum(axis=1)
    return heads


def _backtrack(tables: list[tuple[FloatArray, int]], N: int, take: int, q: int) -> BoolArray:
    keep = np.zeros(N, dtype=bool)
    state = len(tables[0][0]) - 1
    for table, n in reversed(tables):
        state = int(np.argmin(table[: state + 1]))
        take -= n
        keep[take + state * q : take + state * q + n] = True
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
