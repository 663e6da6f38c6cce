"""Partition with a fixed number of samples a micro-batch: who trains on what, and when.

Invariant: the result is a permutation of the items as slots[R, M, m]; each rank gets M
micro-batches of m items. Items are costs in descending order; a partial batch is filled up with
items of cost 0, which the caller strips.

Ranks that wait once a step need equal sums: LPT under a count cap, then swaps. Ranks that wait at
every micro-step need equal costs at equal index: sorted columns. Equal-count KK alone is poor on
heavy tails (Zhang, Mouratidis, Pang 2011), as it makes the largest items share a rank with average
ones.

Example, R = 2, m = 1: [9, 8, 2, 1] in columns is 9 8 | 2 1: waits 1 + 1; equal sums would be
9 1 | 8 2, whose micro-steps wait 1 + 1 as well, but 9 1 | 2 8 would wait 7 + 7.

Micro-batches for pipelines: a rank takes their sum, and its largest once more for each stage.

Invariant: the result is a permutation of the items as slots[R, M, m]; it takes no longer than what
it starts from. Items are costs in descending order.

While a pipeline fills and drains, each stage beyond the first waits for the largest micro-batch. So
micro-batches should be alike, as far as samples can be cut up that way, and a rank that has a large
one all the same should have less besides. Two ways are compared: the ranks that are given, their
items levelled over their own micro-batches; and all micro-batches levelled at once, then dealt to
ranks by LPT, where a rank's first one counts for every stage. Swaps between the slowest rank and
the fastest ones end it.

Example, R = 2, M = 2, 4 stages, costs 9 4 4 2: equal sums, 9 2 | 4 4, take 11 + 27 and 8 + 12; no
swap helps, as whoever has the 9 takes 9 * 4 and its smallest company.
"""

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import by_label
from rollout_planner.split.assign import lpt, spread_columns, spread_falling, swap_level
from rollout_planner.types import FloatArray, IntArray, Sync, even_time, step_time


def step_partition(x: FloatArray, R: int, M: int, m: int, stages: int = 1) -> IntArray:
    """Minimise the largest rank's sum; x float64[R*M*m] descending -> slots[R, M, m].

    Where a rank is a pipeline of several stages, what it takes to fill and drain counts as well.
    """
    p = M * m
    ids = _by_label(lpt(x, R, p), R, p)
    swap_level(ids[None], x)
    slots = into_micro_batches(np.sort(ids, axis=1), M)
    return slots if stages == 1 else for_pipelines(slots, x, stages)


def bins_onto_ranks(load: FloatArray, R: int, M: int, stages: int = 1) -> IntArray:
    """Place, rank * M + micro-step, of each of R*M bins of float64[R*M] cost, M to each rank."""
    falling = np.argsort(-load, kind="stable")
    place = np.empty(R * M, dtype=np.int64)
    if M == 1:
        place[falling] = np.arange(R)
        return place
    place[falling[step_partition(load[falling], R, M, 1, stages).ravel()]] = np.arange(R * M)
    return place


def into_micro_batches(ids: IntArray, M: int) -> IntArray:
    """Deal each rank's items (ascending ids, so falling cost) over its M micro-batches."""
    R, p = ids.shape
    return ids.reshape(R, p // M, M).transpose(0, 2, 1).copy()


def _by_label(labels: IntArray, bins: int, p: int) -> IntArray:
    """ids[bins, p] of items labelled with their bin, p items in each."""
    return by_label(labels, bins).reshape(bins, p)


def column_partition(x: FloatArray, R: int, M: int, m: int) -> IntArray:
    """Minimise the sum over micro-steps of the largest micro-batch -> slots[R, M, m]."""
    if m == 1:  # sorted columns are the optimum
        return _onto_ranks(np.arange(R * M).reshape(M, R, 1), spread_falling(x.reshape(M, R)))
    columns = _bin_columns(x, R, M, m)
    return _onto_ranks(columns, spread_columns(x[columns].sum(axis=2)))


def _onto_ranks(columns: IntArray, ranks: IntArray) -> IntArray:
    """columns[M, R, m] -> slots[R, M, m]; ranks[M, R]: who takes each."""
    slots = np.empty_like(columns)
    slots[np.arange(len(columns))[:, None], ranks] = columns
    return slots.transpose(1, 0, 2)


def _bin_columns(x: FloatArray, R: int, M: int, m: int) -> IntArray:
    """Columns of R bins of m: rows of neighbours, or bins filled to falling levels if better.

    Swaps level the better of the two, unless it is good enough as it is.
    """
    columns = _row_columns(x, R, M, m)
    time, share = _time(columns, x), float(x.sum()) / R
    if time > share * (1 + tuning.LEVEL_COLUMNS):
        level = levels(x, R, M, company=(m - 1) * float(x[-1]))
        start = np.repeat(level[0] - level, R)
        filled = _by_label(lpt(x, R * M, m, start), R * M, m)
        filled = filled[np.argsort(-x[filled].sum(axis=1), kind="stable")].reshape(M, R, m)
        filled_time = _time(filled, x)
        if filled_time < time:
            columns, time = filled, filled_time
    if time > share * (1 + tuning.LEVEL_COLUMNS):
        swap_level(columns, x, enough=tuning.LEVEL_COLUMNS)
    return columns


def _row_columns(x: FloatArray, R: int, M: int, m: int) -> IntArray:
    """Column j holds the next R*m items; in it, each row of R goes largest onto least loaded."""
    neighbours = np.arange(R * M * m).reshape(M, m, R)
    columns = np.empty((M, R, m), dtype=np.int64)
    costs, loads = x.reshape(M, m, R), np.zeros((M, R))
    row = np.arange(M)[:, None]
    for t in range(m):
        order = loads.argsort(axis=1, kind="stable")
        columns[row, order, t] = neighbours[:, t]
        loads[row, order] += costs[:, t]
    return columns


def _time(columns: IntArray, x: FloatArray) -> float:
    return step_time(x[columns].sum(axis=2).T, Sync.MICRO_STEP)


def for_pipelines(slots: IntArray, x: FloatArray, stages: int) -> IntArray:
    """`slots[R, M, m]` of equal sums, or better ones for pipelines of so many stages."""
    R, M, m = slots.shape
    if M == 1:
        return slots
    levelled = slots.copy()
    if m > 1:
        swap_level(levelled, x)
    bins = _level_bins(x, R * M, m)
    load = x[bins].sum(axis=1)
    by_cost = np.argsort(-load, kind="stable")
    dealt = bins[by_cost[_deal(load[by_cost], R, M, stages)]]
    better = min((levelled, dealt), key=lambda found: _pipelined(found, x, stages))
    swapped = _swapped(x[better].sum(axis=2), stages)
    better = better.reshape(R * M, m)[swapped]
    return min((slots, better), key=lambda found: _pipelined(found, x, stages))


def _pipelined(slots: IntArray, x: FloatArray, stages: int) -> float:
    return step_time(x[slots].sum(axis=2), Sync.STEP, stages)


def _level_bins(x: FloatArray, bins: int, m: int) -> IntArray:
    """Bins of m items of about equal cost, ids[bins, m]."""
    if m == 1:
        return np.arange(bins)[:, None]
    ids = np.argsort(lpt(x, bins, m), kind="stable").reshape(bins, m)
    swap_level(ids[None], x)
    return ids


def _deal(load: FloatArray, R: int, M: int, stages: int) -> IntArray:
    """LPT onto R ranks of M each, ids[R, M] of descending `load`; a rank's first counts for all."""
    labels = np.arange(len(load))
    labels[R:] = lpt(load[R:], R, M - 1, start=stages * load[:R])
    return np.argsort(labels, kind="stable").reshape(R, M)


def _swapped(load: FloatArray, stages: int) -> IntArray:
    """Swap micro-batches of slow and fast ranks while that helps: where each of load[R, M] goes."""
    R, M = load.shape
    ids, load = np.arange(R * M).reshape(R, M), load.copy()
    enough = even_time(load, stages) * (1 + tuning.TOLERANCE)
    pairs, looked_at, stalled = R // 2, min(M, tuning.SWAP_SLOTS), 0
    for turn in range(tuning.ROUNDS):
        times = load.sum(axis=1) + (stages - 1) * load.max(axis=1)
        if not pairs or stalled > tuning.OTHER_PAIRINGS or times.max() <= enough:
            break
        by_time = times.argsort(kind="stable")
        high, low = by_time[::-1][:pairs], np.roll(by_time[:pairs], -stalled)
        at = (np.arange(looked_at) * M // looked_at + turn) % M
        slower = _slower_after(load, high, low, at, stages).reshape(pairs, -1)
        best = slower.argmin(axis=1)
        gain = slower[np.arange(pairs), best] < times[high] * (1 - tuning.ROUNDING)
        stalled = 0 if gain[0] else stalled + 1
        one, other = np.divmod(best[gain], looked_at)
        here, there = (high[gain], at[one]), (low[gain], at[other])
        for array in (ids, load):
            array[here], array[there] = array[there], array[here]
    return ids


def _slower_after(
    load: FloatArray, high: IntArray, low: IntArray, at: IntArray, stages: int
) -> FloatArray:
    """Time of the slower of each pair of ranks after each swap, [pair, of high's, of low's]."""
    one, other = load[high], load[low]
    gives, takes = one[:, at, None], other[:, None, at]
    more = takes - gives
    mine = np.maximum(_largest_of_others(one, at)[:, :, None], takes) * (stages - 1)
    theirs = np.maximum(_largest_of_others(other, at)[:, None, :], gives) * (stages - 1)
    mine += one.sum(axis=1)[:, None, None] + more
    theirs += other.sum(axis=1)[:, None, None] - more
    slower: FloatArray = np.maximum(mine, theirs)
    return slower


def _largest_of_others(load: FloatArray, at: IntArray) -> FloatArray:
    """The largest of each row of load[n, M] without the one at each of `at`, [n, len(at)]."""
    order = load.argsort(axis=1, kind="stable")
    rows = np.arange(len(load))[:, None]
    first, second = order[:, -1:], order[:, -2:-1]
    out: FloatArray = load[rows, np.where(at == first, second, first)]
    return out


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


def places_of(load: FloatArray, R: int, M: int, per_step: bool, stages: int = 1) -> IntArray:
    """Give each of R*M micro-batches of this cost its rank and micro-step, rank * M + micro-step.

    Ranks of equal sums, or like with like.
    """
    if per_step:
        return bins_onto_ranks(load, R, M, stages)
    place, by_cost = np.empty(R * M, dtype=np.int64), np.argsort(-load, kind="stable")
    rank_of = spread_columns(load[by_cost].reshape(M, R))
    place[by_cost] = (rank_of * M + np.arange(M)[:, None]).ravel()
    return place
