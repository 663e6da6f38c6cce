"""Padded micro-batches of any number of samples, under a budget of padded tokens.

Invariant: each item is in exactly one run of neighbours; a run is padded to its longest item, so
its count times that one's tokens stay within `budget`, or it is a single item. There are R*M runs,
none empty unless there are fewer items. Items descend in cost and in tokens.

A padded micro-batch costs its count times its longest sample. So sorted runs waste least: whatever
shares a micro-batch with the longest sample left, the next longest may as well. Where ranks
meet at every micro-step, R runs make one, which lasts as long as its *level*, the most that a run
of it costs: levels.py finds those that sum to the least, and fill.py searches around them.
Where ranks meet once a step, runs need not be alike: their ends then move to where the total is
least, and runs are dealt to ranks.

The budget alone does not say how many micro-batches there should be: with more of them runs are
shorter and pad less. M grows from the fewest that fit while another micro-step saves more than it
costs to begin one.

Example, budget 16, R = 2, cost = tokens, items of 8 7 3 3 2 2: M = 1 pads 8 7 | 3 3 2 2 to 16 and
12, which takes 16; with M = 2 it is 8 | 7 and 3 3 | 2 2, which take 8 + 6.
"""

import numpy as np

from rollout_planner import tuning
from rollout_planner.split.leveling import spread_columns
from rollout_planner.split.partition import bins_onto_ranks
from rollout_planner.types import Allowed, FloatArray, IntArray, cut


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
    length = np.clip(np.floor(levels[:, None] / x), 1, most)
    runs = np.maximum((1 / length).sum(axis=1), R * fewest)
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
