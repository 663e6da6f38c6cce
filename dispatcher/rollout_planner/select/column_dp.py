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

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import running_sums
from rollout_planner.types import BoolArray, FloatArray, IntArray


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
    if take >= N:
        return np.ones(N, dtype=bool)
    quantum = -(-(N - take) // tuning.STATES)
    surplus = (N - take) % quantum  # skips that do not fill a quantum: the cheapest penalties
    if surplus:
        free = np.flatnonzero(~forced)
        cheapest = free[np.argsort(penalty[free], kind="stable")[:surplus]]
        live = np.delete(np.arange(N), cheapest)
        x, penalty = x[live], penalty[live]
    repeats = (tuning.SINGLE_COLUMNS, tuning.RUNS_OF_A_SIZE)
    table = _Table.of(len(x), take, G, band=band, q=quantum, repeats=repeats)
    taken = _solve(x, penalty, table, take=take, G=G, price=price)
    keep = np.zeros(N, dtype=bool)
    keep[live[taken] if surplus else taken] = True
    return _repair(keep, forced)


@dataclass(frozen=True, slots=True)
class _Table:
    """Runs of columns, and how many items may be skipped before each: whatever these cost.

    q: skips from one state to the next. sizes: int64[runs], items of each run. at: int64[runs + 1,
    states], where each run begins in each state, and where the last ends. led: float64[runs - 1,
    states], squared distance of skips after each run but the last from their share; inf outside the
    band. begin: float64[states], what each state costs before the first.
    """

    q: int
    sizes: IntArray
    at: IntArray
    led: FloatArray
    begin: FloatArray

    @classmethod
    @lru_cache(maxsize=4)  # most windows are full, as large as the last; it takes a MB or two
    def of(
        cls, N: int, take: int, G: int, *, band: float, q: int, repeats: tuple[int, int]
    ) -> "_Table":
        """For a window of so many items; repeats: see `_run_sizes`."""
        E = N - take
        columns = _run_sizes(take, G, E, band * N, repeats)
        taken = np.minimum(running_sums(np.array(columns)) * G, take)
        skipped = np.arange(E // q + 1) * q
        slack = max(band * N, 1.1 * E * max(columns) * G / take) + q + 2
        ahead = skipped - (E * taken[1:-1] / take)[:, None]
        led = np.where(np.abs(ahead) > slack, np.inf, ahead * ahead)
        begin = np.where(skipped > slack, np.inf, 0.0)
        return cls(q, np.diff(taken), skipped + taken[:, None], led, begin)


def _solve(
    x: FloatArray, penalty: FloatArray, table: _Table, *, take: int, G: int, price: float
) -> IntArray:
    """Which items are taken, rising."""
    heads, work, N = _strided_sums(x, G), float(np.add.reduce(x)), len(x)
    waits = G * heads.item(-G) - work
    costs = _dearer(x, penalty, heads, table.at, G)
    price *= max(waits, tuning.LEAST_WAITS * work) / (N * len(costs) * (N - take))
    costs[:-1] += max(price, 1e-300) * table.led
    best, add, least = table.begin.copy(), np.add, np.minimum.accumulate
    runs = list(costs)
    for run in runs:  # arguments without names, as these take a tenth of the loop
        add(run, best, run)
        least(run, 0, None, best)
    states, state = [], len(best) - 1
    for run in reversed(runs):
        state = int(run[: state + 1].argmin())
        states.append(state)
    skipped: IntArray = table.q * np.array(states[::-1])
    return np.arange(take) + skipped.repeat(table.sizes)


def _dearer(
    x: FloatArray, penalty: FloatArray, heads: FloatArray, at: IntArray, G: int
) -> FloatArray:
    """What each run adds in each state: what its columns wait, less the penalties passed over.

    Its columns wait G times the sum of their first items, less all of them. As penalties are summed
    up from the heavy end, and states are so many skips, what a run does not skip is taken off what
    all before it would cost.
    """
    sums = running_sums(x + penalty)
    begun = (G * heads[: len(sums)] - sums).take(at)
    dearer: FloatArray = begun[1:] - begun[:-1]
    if lack := -int(at[-1, 0]) % G:  # its last column is not full
        dearer[-1] += G * (heads[at[-1] + lack] - heads[at[-1]])
    return dearer


def _run_sizes(take: int, G: int, E: int, band_items: float, repeats: tuple[int, int]) -> list[int]:
    """Columns in each run from the heavy end; runs stop growing where they would burst the band.

    repeats: runs of one column, and then of each size.
    """
    left = -(-take // G)
    sizes: list[int] = []
    size, (times, of_a_size) = 1, repeats
    while left > 0:
        for _ in range(times):
            if left <= 0:
                break
            sizes.append(min(size, left))
            left -= sizes[-1]
        if 1.1 * E * 2 * size * G <= band_items * take:
            size *= 2
        times = of_a_size
    return sizes


def _strided_sums(x: FloatArray, G: int) -> FloatArray:
    """H[i] = x[i-G] + x[i-2G] + ..., up to a column beyond the end.

    So the first items of the columns from item i to j, whole columns later, sum up to H[j] - H[i].
    """
    N = len(x)
    padded = np.zeros((-(-N // G) + 1) * G)
    padded[G : G + N] = x
    return padded.reshape(-1, G).cumsum(axis=0).ravel()


def _repair(keep: BoolArray, forced: BoolArray) -> BoolArray:
    """Each forced item that was skipped takes the place of the nearest one that is free."""
    for i in (forced > keep).nonzero()[0].tolist():
        free = np.flatnonzero(keep & ~forced)
        if not len(free):
            break
        keep[free[np.argmin(np.abs(free - i))]] = False
        keep[i] = True
    return keep
