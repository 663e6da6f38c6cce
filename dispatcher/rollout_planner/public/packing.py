"""Packing lengths into as few bins as a token budget allows, and as even as these can be.

Invariant: every index is in one bin; a bin holds at most `budget` tokens, or a single sample (or
group) that alone exceeds it; no bin is empty unless there are fewer samples than bins.

Best fit says how many bins are enough, and a few less are tried. Into that many bins items go by
cost, by tokens, by Karmarkar-Karp, or as they were fitted; swaps under the budget level each, and
the one whose dearest bin is cheapest wins.

Example, budget 10, lengths 9 2 6 4 5: 26 tokens need 3 bins; 9 | 6 4 | 5 2.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from rollout_planner import tuning
from rollout_planner.cost import LONGEST
from rollout_planner.errors import UnequalPartitions
from rollout_planner.public.arguments import (
    as_groups,
    as_lengths,
    at_least,
    check_fillers,
    check_groups,
    check_longest,
    costs_of,
    option,
    token_budget,
)
from rollout_planner.public.partition import by_falling_sum, fill_empty
from rollout_planner.split.assign import Labels, best_fit, lpt_budget
from rollout_planner.split.karmarkar_karp import differencing_labels
from rollout_planner.split.packing import least_bins, level_columns, num_bins
from rollout_planner.split.trades import traded_bins
from rollout_planner.types import (
    CostModel,
    FloatArray,
    IntArray,
    MicroBatchOrder,
    Oversize,
    round_up,
)


def pack(
    lengths: Any,
    budget: int,
    *,
    cost: CostModel | str | None = None,
    groups: Any = None,
    multiple: int = 1,
    minimum: int = 0,
    pad_to: int = 1,
    oversize: str = Oversize.ERROR,
    order: str = MicroBatchOrder.PEAK_FIRST,
    fillers: bool = True,
) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `budget` tokens: few bins first, then even ones.

    lengths: tokens of each sample (0 counts as 1): a list, an array or a tensor. cost: work of a
    length, what bins are even in; by default quadratic. groups: one name a sample (None: in no
    group); samples of one name share a bin.
    multiple, minimum: the number of bins is a multiple of the one and at least the other; with more
    bins than samples (or groups) the last ones are empty, fillers; with `fillers=False` that is an
    error, for trainers that cannot feed one. pad_to: a sample takes as many
    tokens as the next multiple of it. oversize: a sample (or group) above the budget is an `error`
    or goes `alone`. order: the dearest bin first (`peak-first`), or the cheap ones at both ends
    (`ends-small`), where a pipeline fills and drains. Indices in a bin ascend; without lengths
    there are no bins but for `minimum`.

    Raises SampleTooLong or GroupTooLong, and UnequalPartitions for arguments that cannot be (all
    ValueErrors).
    """
    budget, [pad_to] = token_budget(budget=budget), at_least(1, LONGEST, pad_to=pad_to)
    [multiple], [minimum] = at_least(1, multiple=multiple), at_least(0, minimum=minimum)
    peak_first = MicroBatchOrder.PEAK_FIRST
    turns = option("order", order, peak_first, MicroBatchOrder.ENDS_SMALL)
    alone = option("oversize", oversize, Oversize.ERROR, Oversize.ALONE) is Oversize.ALONE
    tokens = round_up(np.maximum(as_lengths(lengths), 1), pad_to)
    costs, n = costs_of(tokens, cost), len(tokens)
    check_fillers(round_up(max(minimum, min(n, 1)), multiple), n, "minimum and multiple")
    item = np.arange(n) if groups is None else as_groups(groups, n)
    x = np.bincount(item, weights=costs).astype(np.float64)
    s = np.bincount(item, weights=tokens).astype(np.int64)
    if not alone:
        check_longest(tokens, budget)
        check_groups(item, tokens, budget)
    falling = np.lexsort((-x, -s))
    labels = np.empty(len(s), dtype=np.int64)
    labels[falling], bins = _packed(x[falling], s[falling], budget, minimum, multiple)
    if bins > len(s) and not fillers:
        raise UnequalPartitions(
            f"{len(s)} samples or groups cannot fill {bins} bins; lower minimum or multiple, or "
            "allow fillers"
        )
    found = by_falling_sum(labels[item], costs, bins)
    return found if turns is peak_first else found[::2][::-1] + found[1::2]


def _packed(
    x: FloatArray, s: IntArray, budget: int, minimum: int, multiple: int
) -> tuple[Labels, int]:
    """Bin of each item of these costs and falling tokens, and how many bins."""
    fit = best_fit(s, np.full(len(s), budget), budget)
    least, most = least_bins(s, budget), num_bins(fit)
    for bins in range(max(least, most - tuning.FEWER_BINS), most + 1):
        count = round_up(max(bins, minimum), multiple)
        if len(s) <= count:
            return np.arange(len(s)), count
        # Largest onto least loaded may fail with a bin more than it needs. What it fits into fewer
        # is good for more, so that nobody who asks for as many as are needed gets others.
        tried = (_most_even(x, s, each, budget, fit) for each in dict.fromkeys((count, bins)))
        labels = next((labels for labels in tried if labels is not None), None)
        if labels is not None:
            return fill_empty(labels, count), count
    raise AssertionError("what was fitted keeps to the budget")


def _most_even(x: FloatArray, s: IntArray, bins: int, budget: int, fit: Labels) -> Labels | None:
    """The start whose dearest bin is cheapest once levelled; None if none keeps to the budget."""
    best, least = None, np.inf
    enough = float(x.sum()) / bins * (1 + tuning.EVEN_BINS)
    for start in _starts(x, s, bins, budget, fit):
        held, counts = np.bincount(start, s, bins), np.bincount(start, minlength=bins)
        if not ((held <= budget) | (counts == 1)).all():
            continue
        labels = level_columns(fill_empty(start.copy(), bins), x, s, R=bins, M=1, budget=budget)
        dearest = float(np.bincount(labels, weights=x).max())
        if dearest < least:
            best, least = labels, dearest
        if least <= enough:
            break
    many = len(s) > tuning.TRADED_UP_TO
    return best if best is None or many else traded_bins(x, s, best, budget)


def _starts(x: FloatArray, s: IntArray, bins: int, budget: int, fit: Labels) -> Iterator[Labels]:
    """Ways to fill so many bins, some of them above the budget perhaps."""
    by_tokens = s.astype(np.float64)
    dearest_first = np.argsort(-x, kind="stable")
    for weight, sequence in ((x, dearest_first), (by_tokens, np.arange(len(s)))):
        found = lpt_budget(weight[sequence], s[sequence], bins, budget)
        if found is not None:
            labels = np.empty(len(s), dtype=np.int64)
            labels[sequence] = found
            yield labels
    if num_bins(fit) <= bins:
        yield fit
    yield differencing_labels(x, bins, equal_size=False)
    yield differencing_labels(s, bins, equal_size=False)
