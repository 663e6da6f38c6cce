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
"""

import numpy as np

from rollout_planner import tuning
from rollout_planner.bounds import levels
from rollout_planner.order import by_label
from rollout_planner.split.assign import lpt
from rollout_planner.split.leveling import spread_columns, spread_falling, swap_level
from rollout_planner.split.pipelines import for_pipelines
from rollout_planner.types import FloatArray, IntArray, Sync, step_time


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
    if time > share * tuning.FAIR_COLUMNS:
        level = levels(x, R, M, company=(m - 1) * float(x[-1]))
        start = np.repeat(level[0] - level, R)
        filled = _by_label(lpt(x, R * M, m, start), R * M, m)
        filled = filled[np.argsort(-x[filled].sum(axis=1), kind="stable")].reshape(M, R, m)
        filled_time = _time(filled, x)
        if filled_time < time:
            columns, time = filled, filled_time
    if time > share * (1 + tuning.LEVEL_COLUMNS):
        swap_level(columns, x, enough=tuning.LEVEL_COLUMNS, rounds=tuning.COLUMN_ROUNDS)
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
