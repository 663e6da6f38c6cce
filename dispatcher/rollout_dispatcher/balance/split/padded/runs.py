"""Padded micro-batches of any number of samples, under a budget of padded tokens.

Invariant: each item is in exactly one run of neighbours; a run is padded to its longest item, so
its count times that one's tokens stay within `budget`, or it is a single item. There are R*M runs,
none empty unless there are fewer items. Items descend in cost and in tokens.

A padded micro-batch costs its count times its longest sample. So sorted runs waste least: whatever
shares a micro-batch with the longest sample left, the next longest may as well. Where ranks
meet at every micro-step, R runs make one, which lasts as long as its *level*, the most that a run
of it costs: levels.py finds those that sum to the least, and exchange.py improves on few runs.
Where ranks meet once a step, runs need not be alike: their ends then move to where the total is
least, and runs are dealt to ranks.

The budget alone does not say how many micro-batches there should be: with more of them runs are
shorter and pad less. M grows from the fewest that fit while another micro-step saves more than it
costs to begin one.

Example, budget 16, R = 2, cost = tokens, items of 8 7 3 3 2 2: M = 1 pads 8 7 | 3 3 2 2 to 16 and
12, which takes 16; with M = 2 it is 8 | 7 and 3 3 | 2 2, which take 8 + 6.
"""

from typing import NamedTuple

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.split.assign import lpt
from rollout_dispatcher.balance.split.leveling import spread_columns, swap_level
from rollout_dispatcher.balance.split.padded.exchange import exchanged, time_of_runs
from rollout_dispatcher.balance.split.padded.levels import Wanted, level_runs, parts_of_runs
from rollout_dispatcher.plan import Allowed, FloatArray, IntArray, cut


class Runs(NamedTuple):
    """Sorted runs, and who computes each of them when.

    starts: int64[K + 1], where runs begin, and the end. place: int64[K], rank * M + micro-step.
    M: micro-batches a rank.
    """

    starts: IntArray
    place: IntArray
    M: int


def padded_runs(
    x: FloatArray, s: IntArray, R: int, budget: int, allowed: Allowed = int, *, per_step: bool
) -> Runs:
    """Items of cost x and tokens s over R ranks; per_step: these meet once a step."""
    n, most = len(x), most_in_run(s, budget)
    fewest = allowed(-(-max(fewest_runs(s, budget), 1) // R))
    multiple = allowed(fewest + 1) - fewest
    if n <= R * fewest:
        return _dealt(np.arange(n + 1), x, R, fewest, per_step)
    positive = x + (1e-12 * float(x[0]) or 1.0)
    wanted = Wanted(R, fewest, multiple, begin_cost(positive, s, budget))
    starts = level_runs(positive, most, wanted)
    M = (len(starts) - 1) // R
    per_step |= R == 1 and M > tuning.EXCHANGED_ALONE_UP_TO  # nobody waits: what counts is the sum
    if per_step and 1 < M <= tuning.MOVED_UP_TO // R:
        starts = _least_total(starts, x, most, R, M)
    elif R * M <= tuning.EXCHANGED_UP_TO:
        found = [exchanged(starts, positive, most, R)]
        if fewest < M and R * M <= tuning.FEW_RUNS:  # after exchanges fewer may do as well
            fewer = level_runs(positive, most, wanted._replace(begin=np.inf))
            found.append(exchanged(fewer, positive, most, R))
        starts = min(found, key=lambda each: _price(each, positive, wanted))
        M = (len(starts) - 1) // R
    return _dealt(starts, x, R, M, per_step)


def _price(starts: IntArray, x: FloatArray, wanted: Wanted) -> float:
    """What these runs take, and what it costs to begin their micro-steps."""
    return time_of_runs(starts, x, wanted.R) + wanted.begin * ((len(starts) - 1) // wanted.R)


def most_in_run(s: IntArray, budget: int) -> IntArray:
    """Items that a run may hold which begins with an item of `s` tokens, one at least."""
    most: IntArray = np.maximum(budget // np.maximum(s, 1), 1)
    return most


def fewest_runs(s: IntArray, budget: int) -> int:
    """Micro-batches that hold items of falling tokens at least: each is as full as can be."""
    most = most_in_run(s, budget).tolist()
    at = count = 0
    while at < len(most):
        at += most[at]
        count += 1
    return count


def begin_cost(x: FloatArray, s: IntArray, budget: int) -> float:
    """What it costs to begin a micro-step."""
    return tuning.BEGIN_MICRO_STEP * budget * float(x.sum()) / max(float(s.sum()), 1.0)


def cut_padded(ranks: list[IntArray], s: IntArray, budget: int) -> list[list[IntArray]]:
    """Each rank's items, in their order, into runs as full as can be.

    What trainers do that pad what they were dealt; of falling tokens these are the fewest runs.
    """
    return [cut(items, _sizes(s[items].tolist(), budget)) for items in ranks]


def _sizes(s: list[int], budget: int) -> list[int]:
    sizes, count, longest = [], 0, 0
    for tokens in s:
        count, longest = count + 1, max(longest, tokens)
        if count > 1 and count * longest > budget:
            sizes.append(count - 1)
            count, longest = 1, tokens
    return [*sizes, count]


def padded_time(x: FloatArray, s: IntArray, R: int, budget: int, allowed: Allowed) -> float:
    """What a good split takes where ranks meet at every micro-step, with what it costs to begin.

    Without following runs: a micro-step costs a rank its share of what is left, padded, or the
    largest item left.
    """
    most, begin = most_in_run(s, budget), begin_cost(x, s, budget)
    fewest = allowed(-(-max(fewest_runs(s, budget), 1) // R))
    share = float(x.sum()) / R / fewest
    if not share:
        return begin * fewest
    x = np.maximum(x, tuning.LEAST_SHARE * share)
    levels = share * tuning.ESTIMATE_SHARES
    runs = np.maximum(parts_of_runs(x, most, levels)[:, -1], R * fewest)
    held = levels * runs
    best = int(np.argmin(held + begin * runs))
    left, time = float(held[best]) / R, 0.0
    M = allowed(round(float(runs[best]) / R))
    for j in range(M):
        largest = float(x[j * R]) if j * R < len(x) else 0.0
        if largest * (M - j) <= left:
            break
        left = max(left - largest, 0.0)
        time += largest
    return time + left + begin * M


def _least_total(starts: IntArray, x: FloatArray, most: IntArray, R: int, M: int) -> IntArray:
    """Runs as they are, or with their ends where the total is less, if that is less for a rank."""
    share = float(x.sum()) / R
    largest = float((np.diff(starts) * x[starts[:-1]]).max())
    found = [starts]
    found += [_moved(starts, x, most, max(part * share, largest)) for part in tuning.LARGEST_RUN]
    return min(found, key=lambda each: _most_loaded(each, x, R, M))


def _most_loaded(starts: IntArray, x: FloatArray, R: int, M: int) -> float:
    """What the most loaded rank has if runs are dealt by falling cost."""
    load = np.sort(np.diff(starts) * x[starts[:-1]])[::-1]
    return float(np.bincount(lpt(load, R, M), weights=load).max())


def _moved(starts: IntArray, x: FloatArray, most: IntArray, largest: float) -> IntArray:
    """Each run's end moved between its neighbours' to where both waste least, in turns.

    most: items that a run may hold which begins here. largest: what a run may cost.
    """
    starts = starts.copy()
    turns = [np.arange(first, len(starts) - 1, 2) for first in (1, 2)]
    for _ in range(tuning.END_SWEEPS):
        for turn in turns:
            first, at, last = starts[turn - 1, None], starts[turn, None], starts[turn + 1, None]
            spread = first + ((last - first) * tuning.END_SPREAD).astype(np.int64)
            to = np.clip(
                np.concatenate((spread, at + tuning.END_CLOSE), axis=1), first + 1, last - 1
            )
            dear, cheap = x[first], x[to]
            gain = (last - to) * (dear - cheap)
            fits = (to - first <= most[first]) & (last - to <= most[to])
            fits &= ((to - first) * dear <= largest) & ((last - to) * cheap <= largest)
            gain[~fits] = -1.0
            best, rows = gain.argmax(axis=1), np.arange(len(turn))
            better = gain[rows, best] > ((last - at) * (dear - x[at]))[:, 0]
            starts[turn[better]] = to[rows[better], best[better]]
    return starts


def _dealt(starts: IntArray, x: FloatArray, R: int, M: int, per_step: bool) -> Runs:
    return Runs(starts, places_of(np.diff(starts) * x[starts[:-1]], R, M, per_step), M)


def places_of(load: FloatArray, R: int, M: int, per_step: bool) -> IntArray:
    """Give each run of this cost its rank and micro-step: ranks of equal sums, or like with like.

    int64[runs], rank * M + micro-step; there are R*M runs at most.
    """
    runs, load = len(load), np.append(load, np.zeros(R * M - len(load)))
    by_cost = np.argsort(-load, kind="stable")
    load = load[by_cost]
    place = np.empty(R * M, dtype=np.int64)
    if per_step:
        ids = np.argsort(lpt(load, R, M), kind="stable").reshape(R, M)
        swap_level(ids[None], load, enough=tuning.LEVEL_PADDED, rounds=tuning.PADDED_ROUNDS)
        place[by_cost[np.sort(ids, axis=1).ravel()]] = np.arange(R * M)
    else:
        rank_of = spread_columns(load.reshape(M, R))
        place[by_cost] = (rank_of * M + np.arange(M)[:, None]).ravel()
    return place[:runs]
