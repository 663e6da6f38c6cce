"""Splitting costs into k parts of nearly equal sums, as well as this planner can.

Invariant: every index is in one part and no part is empty; the largest sum is at most LPT's (Graham
1969) and Karmarkar-Karp's, but for what rounding does.

The best of two starts, LPT and KK, each levelled by swaps, of few items by trades as well.
Where parts have to be equal in number KK is poor on heavy tails, as it pairs the largest with the
smallest before it has seen the rest; where they need not be it is often the best.
`get_seqlen_balanced_partitions` is KK alone, index for index as in verl.

Example, 8 7 6 5 4 into 2: LPT makes 8 5 4 | 7 6, which is 17 and 13; KK 8 6 | 7 5 4, 14 and 16;
with 6 and 7 swapped that is 8 7 | 6 5 4, 15 each.

Packing lengths into as few bins as a token budget allows, and as even as these can be.

Invariant: every index is in one bin; a bin holds at most `budget` tokens, or a single sample (or
group) that alone exceeds it; no bin is empty unless there are fewer samples than bins.

Best fit says how many bins are enough, and a few less are tried. Into that many bins items go by
cost, by tokens, by Karmarkar-Karp, or as they were fitted; swaps under the budget level each, and
the one whose dearest bin is cheapest wins.

Example, budget 10, lengths 9 2 6 4 5: 26 tokens need 3 bins; 9 | 6 4 | 5 2.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from rollout_planner import tuning
from rollout_planner.cost import LONGEST
from rollout_planner.errors import UnequalPartitions
from rollout_planner.objective import rank_bound
from rollout_planner.order import as_lists
from rollout_planner.public import arguments
from rollout_planner.split import assign
from rollout_planner.split.karmarkar_karp import differencing_labels
from rollout_planner.split.trades import traded_bins
from rollout_planner.types import (
    CostModel,
    FloatArray,
    IntArray,
    MicroBatchOrder,
    Oversize,
    round_up,
)


def balanced_partition(costs: Any, k: int, *, equal_size: bool) -> list[list[int]]:
    """Indices of `costs` in k parts whose sums are as equal as can be; the largest sum first.

    costs: one number an item, in any unit: a list, an array or a tensor. With `equal_size` all
    parts have as many items, otherwise at least one; items that cost nothing are spread so that
    parts are alike in number. Indices in a part ascend. Raises
    UnequalPartitions (a ValueError, and an AssertionError) if there are fewer items than parts, if
    equal sizes cannot be, and for a cost that is negative or not finite.
    """
    given, [k] = arguments.as_costs(costs), arguments.at_least(1, k=k)
    if len(given) < k:
        raise UnequalPartitions(f"{len(given)} items cannot fill {k} parts; use fewer parts")
    if equal_size and len(given) % k:
        raise UnequalPartitions(f"{len(given)} items do not split into {k} parts of equal size")
    order = np.argsort(-given, kind="stable")
    x = given[order]
    labels = np.empty(len(x), dtype=np.int64)
    labels[order] = _even(x, k, equal_size=True) if equal_size else _of_any_size(x, k)
    return by_falling_sum(labels, given, k)


def log_seqlen_unbalance(
    seqlen_list: Any, partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """How far sums of lengths differ: as the batch came, cut in order, and as it is split.

    For a batch that divides by the number of parts the figures are those of verl's function.

    seqlen_list: tokens of each sample. partitions: indices of each part, as `balanced_partition` or
    `get_seqlen_balanced_partitions` give them. Returns, each with `prefix/` before it: `min`, `max`
    and `minmax_diff` of the parts that the batch falls into if it is cut in order, `balanced_min`
    and `balanced_max` of `partitions`, and the `mean` of both. It returns and logs nothing itself:
    trainers update their metrics with it. Raises UnequalPartitions if there are no parts, or
    an index is none of a length's.
    """
    lengths, k = arguments.as_plain(seqlen_list), len(partitions)
    if not k:
        raise UnequalPartitions("there are no partitions to describe")
    for i in chain.from_iterable(partitions):
        if not 0 <= i < len(lengths):
            raise UnequalPartitions(
                f"a partition has index {i}, and there are {len(lengths)} lengths"
            )
    cuts = [len(lengths) * i // k for i in range(k + 1)]
    before = [sum(lengths[a:b]) for a, b in pairwise(cuts)]
    after = [sum(lengths[i] for i in part) for part in partitions]
    figures = {
        "min": min(before),
        "max": max(before),
        "minmax_diff": max(before) - min(before),
        "balanced_min": min(after),
        "balanced_max": max(after),
        "mean": sum(before) / k,
    }
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def by_falling_sum(labels: IntArray, costs: FloatArray, k: int) -> list[list[int]]:
    """Ascending indices of each label, the largest sum of costs first, ties by label."""
    sums = np.bincount(labels, weights=costs, minlength=k)
    place = np.empty(k, dtype=np.int64)
    place[np.argsort(-sums, kind="stable")] = np.arange(k)
    return as_lists(place[labels], k)


def fill_empty(labels: IntArray, k: int) -> IntArray:
    """Give each label that has no item one: the last of those with the most.

    With items by falling cost that raises no sum above the largest, since the item was a part of
    another sum before.
    """
    counts = np.bincount(labels, minlength=k)
    for empty in np.flatnonzero(counts == 0).tolist():
        fullest = int(counts.argmax())
        if counts[fullest] < 2:
            break
        labels[np.flatnonzero(labels == fullest)[-1]] = empty
        counts[fullest] -= 1
        counts[empty] = 1
    return labels


def _of_any_size(x: FloatArray, k: int) -> IntArray:
    """Part of each of falling `x`; what costs nothing goes to whichever part has fewest."""
    worth = int(np.count_nonzero(x))
    labels = _even(x[:worth], k, equal_size=False) if worth > k else np.arange(worth)
    counts = np.bincount(labels, minlength=k).astype(np.float64)
    return np.append(labels, assign.lpt(np.ones(len(x) - worth), k, len(x), start=counts))


def _even(x: FloatArray, k: int, *, equal_size: bool) -> IntArray:
    """Part of each of falling `x`."""
    cap, n = len(x) // k if equal_size else len(x), len(x)
    starts = (
        assign.lpt(x, k, cap) if by_lpt else differencing_labels(x, k, equal_size)
        for by_lpt in (True, False)
    )
    enough = rank_bound(x, k, cap if equal_size else None) * (1 + tuning.ROUNDING)
    best = _best(starts, x, np.ones(n, dtype=np.int64), k, cap, enough=enough)
    assert best is not None, "there is a way"
    return best


def _best(
    starts: Iterable[IntArray], x: FloatArray, s: IntArray, bins: int, cap: int, *, enough: float
) -> IntArray | None:
    """Bin of each item after swaps, or moves into what `cap` leaves room for, and trades.

    starts: bin of each, of which the first is taken whose dearest bin then costs `enough`, or the
    most even of all; None where each goes beyond the cap.
    """
    best, least = None, np.inf
    for start in starts:
        held, counts = np.bincount(start, s, bins), np.bincount(start, minlength=bins)
        if ((held > cap) & (counts > 1)).any():
            continue
        filled = fill_empty(start.copy(), bins)
        labels = fill_empty(assign.levelled(filled, x, bins, s, cap), bins)
        if len(x) <= tuning.COMPARED_UP_TO:
            labels = traded_bins(x, s, labels, cap)
        dearest = float(np.bincount(labels, x, bins).max())
        if dearest < least:
            best, least = labels, dearest
        if least <= enough:
            break
    return best


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
    budget = arguments.token_budget(budget=budget)
    [pad_to] = arguments.at_least(1, LONGEST, pad_to=pad_to)
    [multiple] = arguments.at_least(1, multiple=multiple)
    [minimum] = arguments.at_least(0, minimum=minimum)
    peak_first = MicroBatchOrder.PEAK_FIRST
    turns = arguments.option("order", order, peak_first, MicroBatchOrder.ENDS_SMALL)
    alone = arguments.option("oversize", oversize, Oversize.ERROR, Oversize.ALONE) is Oversize.ALONE
    tokens = round_up(np.maximum(arguments.as_lengths(lengths), 1), pad_to)
    costs, n = arguments.costs_of(tokens, cost), len(tokens)
    arguments.check_fillers(round_up(max(minimum, min(n, 1)), multiple), n, "minimum and multiple")
    item = np.arange(n) if groups is None else arguments.as_groups(groups, n)
    x = np.bincount(item, weights=costs).astype(np.float64)
    s = np.bincount(item, weights=tokens).astype(np.int64)
    if not alone:
        arguments.check_fits(tokens, budget, item)
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
) -> tuple[IntArray, int]:
    """Bin of each item of these costs and falling tokens, and how many bins."""
    fit = assign.best_fit(s, np.full(len(s), budget), budget)
    most = assign.num_bins(fit)
    for bins in range(max(most - tuning.FEWER_BINS, min(most, 1)), most + 1):
        count = round_up(max(bins, minimum), multiple)
        if len(s) <= count:
            return np.arange(len(s)), count
        # Largest onto least loaded may fail with a bin more than it needs. What it fits into fewer
        # is good for more, so that nobody who asks for as many as are needed gets others.
        for each in dict.fromkeys((count, bins)):
            enough = float(x.sum()) / each * (1 + tuning.LEVEL)
            packings = _packings(x, s, each, budget, fit)
            labels = _best(packings, x, s, each, budget, enough=enough)
            if labels is not None:
                return fill_empty(labels, count), count
    raise AssertionError("what was fitted keeps to the budget")


def _packings(
    x: FloatArray, s: IntArray, bins: int, budget: int, fit: IntArray
) -> Iterator[IntArray]:
    """Ways to fill so many bins, some of them above the budget perhaps."""
    by_tokens = s.astype(np.float64)
    dearest_first = np.argsort(-x, kind="stable")
    for weight, sequence in ((x, dearest_first), (by_tokens, np.arange(len(s)))):
        found = assign.lpt_budget(weight[sequence], s[sequence], bins, budget)
        if found is not None:
            labels = np.empty(len(s), dtype=np.int64)
            labels[sequence] = found
            yield labels
    if assign.num_bins(fit) <= bins:
        yield fit
    yield differencing_labels(x, bins, equal_size=False)
    yield differencing_labels(s, bins, equal_size=False)
