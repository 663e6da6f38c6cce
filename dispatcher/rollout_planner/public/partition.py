"""Splitting costs into k parts of nearly equal sums, as well as this planner can.

Invariant: every index is in one part and no part is empty; the largest sum is at most LPT's (Graham
1969) and Karmarkar-Karp's, but for what is too little to look further (`tuning.EVEN_PARTS`).

The best of a few starts, each levelled by swaps: the planner's own split (of equal sizes), LPT, KK.
Where parts have to be equal in number KK is poor on heavy tails, as it pairs the largest with the
smallest before it has seen the rest; where they need not be it is often the best.
`get_seqlen_balanced_partitions` is KK alone, index for index as in verl.

Example, 8 7 6 5 4 into 2: LPT makes 8 5 4 | 7 6, which is 17 and 13; KK 8 6 | 7 5 4, 14 and 16;
with 6 and 7 swapped that is 8 7 | 6 5 4, 15 each.
"""

from collections.abc import Iterator, Sequence
from heapq import heapreplace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from rollout_planner import tuning
from rollout_planner.bounds import rank_bound
from rollout_planner.errors import UnequalPartitions
from rollout_planner.public.arguments import as_costs, as_plain, at_least
from rollout_planner.split.assign import lpt, swap_level
from rollout_planner.split.karmarkar_karp import differencing_labels
from rollout_planner.split.packing import bin_of_each, members, too_many_slots
from rollout_planner.split.partition import step_partition
from rollout_planner.types import FloatArray, IntArray, cut


def balanced_partition(costs: Any, k: int, *, equal_size: bool) -> list[list[int]]:
    """Indices of `costs` in k parts whose sums are as equal as can be; the largest sum first.

    costs: one number an item, in any unit: a list, an array or a tensor. With `equal_size` all
    parts have as many items, otherwise at least one; items that cost nothing are spread so that
    parts are alike in number. Indices in a part ascend. Raises
    UnequalPartitions (a ValueError, and an AssertionError) if there are fewer items than parts, if
    equal sizes cannot be, and for a cost that is negative or not finite.
    """
    given, [k] = as_costs(costs), at_least(1, k=k)
    if len(given) < k:
        raise UnequalPartitions(f"{len(given)} items cannot fill {k} parts; use fewer parts")
    if equal_size and len(given) % k:
        raise UnequalPartitions(f"{len(given)} items do not split into {k} parts of equal size")
    order = np.argsort(-given, kind="stable")
    x = given[order]
    labels = np.empty(len(x), dtype=np.int64)
    labels[order] = _best(x, k, equal_size) if equal_size else _of_any_size(x, k)
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
    lengths, k = as_plain(seqlen_list), len(partitions)
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


def as_lists(labels: IntArray, k: int) -> list[list[int]]:
    """Ascending indices of each of k labels."""
    if not k:
        return []
    order = np.argsort(labels, kind="stable")
    return cut(order.tolist(), np.bincount(labels, minlength=k).tolist())


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
    labels = _best(x[:worth], k, equal_size=False) if worth > k else np.arange(worth)
    counts = np.bincount(labels, minlength=k).tolist()
    fewest = sorted(zip(counts, range(k), strict=True))
    rest = []
    for _ in range(worth, len(x)):
        count, part = fewest[0]
        heapreplace(fewest, (count + 1, part))
        rest.append(part)
    return np.append(labels, np.array(rest, dtype=np.int64))


def _best(x: FloatArray, k: int, equal_size: bool) -> IntArray:
    """Part of each of falling `x`."""
    bound = rank_bound(x, k, len(x) // k if equal_size else None)
    best, least = np.arange(len(x)) % k, np.inf
    for start in _starts(x, k, equal_size):
        labels = _levelled(start, x, k, equal_size)
        largest = float(np.bincount(labels, weights=x, minlength=k).max())
        if largest < least:
            best, least = labels, largest
        if least <= bound * (1 + tuning.EVEN_PARTS):
            break
    return best


def _starts(x: FloatArray, k: int, equal_size: bool) -> Iterator[IntArray]:
    cap = len(x) // k if equal_size else len(x)
    yield lpt(x, k, cap)
    if equal_size:
        yield labels_of(step_partition(x, k, 1, cap)[:, 0].tolist(), len(x))
    yield differencing_labels(x, k, equal_size)


def labels_of(parts: list[list[int]], n: int) -> IntArray:
    """Part of each of n items."""
    labels = np.empty(n, dtype=np.int64)
    for number, part in enumerate(parts):
        labels[part] = number
    return labels


def _levelled(labels: IntArray, x: FloatArray, k: int, equal_size: bool) -> IntArray:
    """Swap items between parts; where sizes may differ, also with nothing in return.

    Not where one part has so many more than others that most slots would be empty.
    """
    n = len(x)
    if equal_size:
        ids = np.argsort(labels, kind="stable").reshape(k, n // k)
        swap_level(ids[None], x)
    else:
        labels = fill_empty(labels, k)
        if too_many_slots(labels, k):
            return labels
        ids = members(labels, k)
        swap_level(ids[None], np.append(x, 0.0))
    return fill_empty(bin_of_each(ids, n), k)
