"""Packing with a token budget: micro-batches of any count whose tokens stay within the budget.

Invariant: each item is in one bin; a bin holds at most `budget` tokens, or a single item that
alone exceeds it; the number M of bins a rank is the smallest that the ways below find, never
more than best fit needs, a number that is allowed, and the same on all ranks. Whether more are
worth it is for the strategy.

Bins come in M columns of R, one a micro-step, and only differences inside a column cost time.
Columns that a large item rules are filled one by one to its level (column_fill.py), the others
share the rest by LPT under the budget (assign.py); swaps then level each column, until what
is left to gain is less than any cost model knows. Where the budget is too tight for that, bins
are filled by tokens alone: LPT, then best fit.

Example, budget 10, R = 2, items of 8, 5, 4, 3 tokens, cost = tokens: 20 tokens need M = 1 bin a
rank; 8 | 5, 4 joins 5, 3 fits neither: best fit gives no room either (8 | 5 4), so M = 2.

How few bins may hold all items under a token budget.

Invariant: `least_bins` never exceeds the bins of a legal packing.

The bound is Martello & Toth's L2 (1990). For any a: items above budget - a stand alone, each of
the others above half the budget has a bin to itself, and the items from a to half the budget go
where these leave room, or into more bins.
Example, budget 10, items 7 7 6 4 2: their sum is 26, so 3 bins; with a = 4, the 7s stand alone,
6 4 are full, and as 2 is below a, L2 is 3 as well. With 7 7 6 4 4 it is 4.
"""

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import by_label, falling_place, running_sums
from rollout_planner.select.columns import fill_columns, is_ruled
from rollout_planner.split.assign import Labels, best_fit, lpt_budget, swap_level
from rollout_planner.types import Allowed, FloatArray, IntArray


def fewest_micro_batches(s: IntArray, R: int, budget: int) -> int:
    """Bound on M: room for all tokens, and a bin for each item above half the budget."""
    longest, tokens = int(np.maximum.reduce(s, initial=0)), int(np.add.reduce(s))
    alone = halves = 0
    if longest > budget:
        over = s > budget
        alone, tokens = int(np.count_nonzero(over)), int(s[~over].sum())
    if 2 * longest > budget:
        halves = int(np.count_nonzero(s > budget // 2))
    bins = max(alone - (-tokens // budget), halves, 1)
    return -(-bins // R)


def pack(
    x: FloatArray, s: IntArray, R: int, budget: int, allowed: Allowed = int
) -> tuple[Labels, int]:
    """Bin of each item and M; bin b is micro-step b // R. Items descend in cost and in tokens."""
    labels, M = fill(x, s, R, budget, allowed)
    return level_columns(labels, x, s, R=R, M=M, budget=budget), M


def fill(
    x: FloatArray, s: IntArray, R: int, budget: int, allowed: Allowed = int
) -> tuple[Labels, int]:
    """The same before swaps level the columns.

    M is the least that all tokens need if items can be placed by cost, or by tokens; else it rises,
    up to what best fit needs.
    """
    M = allowed(fewest_micro_batches(s, R, budget))
    labels = _fill(x, s, R, M, budget)
    if labels is not None:
        return labels, M
    tight = best_fit(s, np.full(len(s), budget), budget)
    least, enough = (allowed(-(-bins // R)) for bins in (least_bins(s, budget), num_bins(tight)))
    while labels is None and enough > M:
        M = max(allowed(M + 1), least)
        labels = _fill(x, s, R, M, budget)
    return tight if labels is None else labels, M


def _fill(x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> Labels | None:
    """By cost, micro-step after micro-step; else all at once; else by tokens alone."""
    labels = fill_columns(x, s, R, M, budget) if is_ruled(x, R, M) else None
    if labels is None:
        labels = lpt_budget(x, s, R * M, budget)
    if labels is None:
        labels = lpt_budget(s.astype(np.float64), s, R * M, budget)
    return labels


def level_columns(
    labels: Labels, x: FloatArray, s: IntArray, *, R: int, M: int, budget: int
) -> Labels:
    """Sort bins by cost, cut them into columns of R, swap inside columns."""
    bins = R * M
    load = np.bincount(labels, weights=x, minlength=bins).astype(np.float64)
    labels = falling_place(load)[labels]
    if too_many_slots(labels, bins):
        return labels
    ids = members(labels, bins).reshape(M, R, -1)
    x, s = np.concatenate((x, (0.0,))), np.concatenate((s, (0,)))
    swap_level(ids, x, s, budget, enough=tuning.LEVEL_PACKING, rounds=tuning.PACKING_ROUNDS)
    return bin_of_each(ids.reshape(bins, -1), len(labels))


def members(labels: Labels, bins: int) -> IntArray:
    """Items of each bin as rows [bins, slots], padded with len(labels); a free slot in each."""
    counts = np.bincount(labels, minlength=bins)
    slots = int(counts.max(initial=0)) + 1
    ids = np.full((bins, slots), len(labels), dtype=np.int64)
    first = np.arange(0, bins * slots, slots) - counts.cumsum() + counts
    ids.ravel()[first.repeat(counts) + np.arange(len(labels))] = by_label(labels, bins)
    return ids


def bin_of_each(ids: IntArray, n: int) -> Labels:
    """Bin of each of n items from `members`, whose rows may have been swapped since."""
    labels = np.empty(n + 1, dtype=np.int64)
    labels[ids] = np.arange(len(ids))[:, None]
    return labels[:-1]


def too_many_slots(labels: Labels, bins: int) -> bool:
    """Whether the rows of `members` would be nearly all padding, and large."""
    return bins * int(np.bincount(labels).max(initial=0)) > tuning.TOO_MANY_SLOTS


def least_bins(s: IntArray, budget: int) -> int:
    """Bound on the bins that falling `s` needs; an item above the budget has one to itself."""
    rising = np.minimum(s, budget)[::-1]
    sums = running_sums(rising)
    a = np.unique(np.append(rising[2 * rising <= budget], 0))
    halves = int(np.searchsorted(rising, budget // 2, "right"))
    alone = np.searchsorted(rising, budget - a, "right")
    small = np.searchsorted(rising, a, "left")
    room = (alone - halves) * budget - (sums[alone] - sums[halves])
    more = np.maximum(sums[halves] - sums[small] - room, 0)
    return len(rising) - halves + int((-(-more // budget)).max())


def num_bins(labels: Labels) -> int:
    """Bins of a packing numbered from 0."""
    return int(labels.max(initial=-1)) + 1
