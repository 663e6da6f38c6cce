"""Packing samples as they are, not padded, into micro-batches that hold at most a budget of tokens.

Invariant: each item is in one bin; a bin holds at most `budget` tokens, or a single item that
alone exceeds it; the number M of bins a rank is the smallest that the ways below find, never
more than best fit needs, a number that is allowed, and the same on all ranks. Whether more are
worth it is for the strategy. A fixed number of samples is a budget of which each takes one.

Where ranks wait at every micro-step (`pack`), bins come in M columns of R, one a micro-step, and
only differences inside a column cost time. A micro-step lasts at least as long as its largest item.
`levels_under` gives the time of each: where the largest item left is more than an even share, that
item's, raised where the later micro-steps could not hold the tokens that it leaves them. Each item,
the largest first, goes to the first such micro-step whose least loaded bin stays below the level,
or else by LPT to the others. Swaps then level each column, until what is left to gain is less than
any cost model knows. Where the budget is too tight for that, bins are filled by LPT, by tokens
alone, then by best fit. Full micro-batches of a fixed number of samples leave swaps little room, so
they begin as rows of neighbours (`pack_by_count`).

Example, R = 2, M = 2, costs 9 5 4 3 3: the share is 6, so the first micro-step gets level 9:
9 | 5 4; the second shares the rest: 3 | 3.
Example, R = 2, budget 10, cost = tokens, 8 5 4 3: 20 tokens need M = 1 bin a rank; 8 | 5 4, and 3
fits neither, nor by best fit, so M = 2.

Where ranks meet once a step (`pack_ranks`) what counts is the most that a rank has in all. Bins, as
few as can be, go to ranks, M to each, so that their sums are close. Where these are not level,
samples go to ranks by cost, largest first onto the least loaded, and each rank packs its own; what
finds no room there goes where there is some; and the better way stays. Swaps between ranks, in and
out of micro-batches with room, level what is left of either.

Example, R = 2, budget 10, tokens 10 6 5 5 3 2 1, cost tokens squared: 32 tokens need M = 2. By
cost 10 2 | 6 5 5 3 1 are 104 and 96, and the second rank packs as 6 3 1 and 5 5.
"""

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import falling_place, running_sums
from rollout_planner.split import assign
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
) -> tuple[IntArray, int]:
    """Bin of each item and M; bin b is micro-step b // R. Items descend in cost and in tokens."""
    labels, M = fill(x, s, R, budget, allowed)
    return level_columns(labels, x, s, R=R, M=M, budget=budget), M


def pack_by_count(x: FloatArray, R: int, M: int, most: int) -> IntArray:
    """Bin of each item, of which a bin has room for `most`: rows of neighbours, or LPT to levels.

    Swaps level the better of the two, unless it is good enough as it is.
    """

    def time(labels: IntArray) -> float:
        load = np.bincount(labels, weights=x, minlength=R * M)
        return float(-np.sort(-load)[::R].sum())

    even, each = float(x.sum()) / R * (1 + tuning.LEVEL_COLUMNS), -(-len(x) // (R * M))
    labels = assign.rows_of_neighbours(x, R, M, min(most, 2 * each))
    if time(labels) > even:
        level = assign.levels(
            x, R, M, company=(most - 1) * x.item(-1) if len(x) == R * M * most else 0.0
        )
        labels = min((labels, assign.lpt(x, R * M, most, np.repeat(level[0] - level, R))), key=time)
    if time(labels) > even:
        ones = np.ones(len(x), dtype=np.int64)
        labels = level_columns(labels, x, ones, R=R, M=M, budget=most)
    return labels


def fill(
    x: FloatArray, s: IntArray, R: int, budget: int, allowed: Allowed = int
) -> tuple[IntArray, int]:
    """As `pack`, before swaps level the columns.

    M is the least that all tokens need if items can be placed by cost, or by tokens; else it rises,
    up to what best fit needs.
    """
    M = allowed(fewest_micro_batches(s, R, budget))
    labels = _fill(x, s, R, M, budget)
    if labels is not None:
        return labels, M
    tight = assign.best_fit(s, np.full(len(s), budget), budget)
    enough = allowed(-(-assign.num_bins(tight) // R))
    while labels is None and enough > M:
        M = allowed(M + 1)
        labels = _fill(x, s, R, M, budget)
    return tight if labels is None else labels, M


def _fill(x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> IntArray | None:
    """By cost, ruled micro-steps up to their levels first; else all at once; else by tokens."""
    order = np.argsort(-x, kind="stable")  # whole groups may fall in tokens alone
    dearest, tokens = x[order], np.minimum(s, budget)[order]
    if is_ruled(dearest, R, M):
        level = levels_under(dearest, tokens, R, M, budget)
        most = np.where(level > level[-1], level * (1 + tuning.ROUNDING), np.inf)
        kinds = [assign.Kind(most=each) for each in most.repeat(R).tolist()]
        found = np.empty(len(x), dtype=np.int64)
        found[order] = assign.put(dearest, tokens, [budget] * (R * M), kinds)
        if found.min() >= 0:
            return found
    labels = assign.lpt_budget(x, s, R * M, budget)
    if labels is None:
        labels = assign.lpt_budget(s.astype(np.float64), s, R * M, budget)
    return labels


def level_columns(
    labels: IntArray, x: FloatArray, s: IntArray, *, R: int, M: int, budget: int
) -> IntArray:
    """Sort bins by cost, cut them into columns of R, swap inside columns."""
    bins = R * M
    load = np.bincount(labels, weights=x, minlength=bins).astype(np.float64)
    return assign.levelled(
        falling_place(load)[labels], x, bins, s, budget, rows=M, enough=tuning.LEVEL
    )


def is_ruled(x: FloatArray, R: int, M: int) -> bool:
    """Whether the largest of falling `x` exceeds an even share of several micro-steps."""
    return M > 1 and bool(x[0] * (R * M) > x.sum())


def levels_under(x: FloatArray, s: IntArray, R: int, M: int, budget: int) -> FloatArray:
    """What each of M micro-steps takes, descending, as if all but the largest items could be cut.

    A micro-step costs a rank its share of what is left or the largest item left. In the latter
    case it is filled up from the dear end, as far as the token budget goes, and its level rises
    if it leaves more tokens than the later micro-steps can well hold.
    """
    cost, held, n = running_sums(x), running_sums(s), len(x)
    all_cost, all_tokens = cost.item(n), held.item(n)
    fill = (1 + all_tokens / (R * M * budget)) / 2  # of a micro-step's room: halfway to full
    cheapest = x.item(n - 1) / max(s.item(n - 1), 1)
    levels, first = np.zeros(M), 0
    light = 0.0  # tokens that earlier micro-steps took from the light end, at the cheapest price
    for column in range(M):
        tokens = all_tokens - held.item(first) - light
        left = all_cost - cost.item(first) - light * cheapest
        if left <= 0 or tokens <= 0:
            break
        share, level = left / (R * (M - column)), x.item(first)
        last = column == M - 1
        if level <= share and not last:
            levels[column:] = share
            break
        seeds = slice(first, min(first + R, n))
        rest = max(tokens - float(np.add.reduce(s[seeds])), 1.0)
        price = max((left - float(np.add.reduce(x[seeds]))) / rest, 0.0) or left / tokens
        if last:
            level = max(share, level)
            levels[column] = _with_room(x[seeds], s[seeds], level, (tokens, price), budget)
            break
        room = np.minimum(budget, s[seeds] + (level - x[seeds]) / price)
        by_tokens = held.searchsorted(held.item(first) + np.add.reduce(room), "right")
        by_cost = cost.searchsorted(cost.item(first) + R * level, "right")
        first = max(int(min(by_tokens, by_cost)) - 1, first + 1)
        lack = all_tokens - held.item(first) - light - fill * R * (M - column - 1) * budget
        if lack > 0:
            light += lack
            level += lack * cheapest / max(int(np.count_nonzero(room < budget)), 1)
        levels[column] = level
    return levels


def _with_room(
    x: FloatArray, s: IntArray, level: float, needed: tuple[float, float], budget: int
) -> float:
    """Raise a level until bins that start with one of these items each have room for all tokens.

    needed: the tokens, and the price of each: below its level a bin takes them, up to the budget.
    """
    tokens, price = needed
    for _ in range(tuning.RISES):
        room = np.minimum(budget, s + (level - x) / price)
        lack = tokens - float(np.add.reduce(room))
        if lack <= 0:
            break
        open_bins = int(np.count_nonzero(room < budget))
        if not open_bins:
            break
        level += lack / open_bins * price
    return level


def pack_ranks(
    x: FloatArray, s: IntArray, R: int, budget: int, allowed: Allowed = int
) -> tuple[IntArray, int]:
    """Micro-batch of each item, numbered rank by rank, and M; items fall in cost and in tokens."""
    bins, M = fill(x, s, R, budget, allowed)
    t, load = np.minimum(s, budget), np.bincount(bins, weights=x, minlength=R * M)

    def levelled(labels: IntArray) -> IntArray:
        return assign.levelled(labels, x, R * M, t, budget, parts=M)

    def time(labels: IntArray) -> float:
        return float(np.bincount(labels // M, weights=x).max())

    found = levelled(assign.bins_onto_ranks(load.astype(np.float64), R, M)[bins])
    if time(found) > max(float(x.sum()) / R, x.item(0)) * (1 + tuning.LEVEL):
        start = _by_samples(x, t, R, M, budget)
        found = found if start is None else min((found, levelled(start)), key=time)
    return found, M


def _by_samples(x: FloatArray, t: IntArray, R: int, M: int, budget: int) -> IntArray | None:
    """Samples onto ranks, then each rank's into its micro-batches; None if some find no room.

    What its rank has no room for goes where there is some, on the least loaded rank.
    """
    rank = assign.lpt_budget(x, t, R, M * budget)
    if rank is None:
        return None
    rank = assign.levelled(rank, x, R, t, M * budget)
    own = assign.fill_sets(x, t, rank, M, budget)
    labels = np.where(own < 0, -1, own + rank * M)
    placed = labels >= 0
    room = budget - np.bincount(labels[placed], t[placed], R * M).astype(np.int64)
    load = np.bincount(rank[placed], x[placed], R)
    for i in np.flatnonzero(~placed).tolist():
        fits = np.flatnonzero(room >= t[i])
        if not len(fits):
            return None
        labels[i] = b = fits[load[fits // M].argmin()]
        room[b] -= t[i]
        load[b // M] += x[i]
    return labels
