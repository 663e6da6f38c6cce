"""Karmarkar-Karp: split numbers into k sets of nearly equal sums, by largest differencing.

Invariant: the sums are those of the textbook method on a heap of k-tuples, ties included.

Karmarkar & Karp 1982. A state is k disjoint sets. The two states with the largest spread
(largest minus smallest sum) merge: the largest set of one joins the smallest of the other. With
`equal_size` states start as k neighbours of the sorted list, so counts stay equal (BLDM,
Michiels et al.); otherwise each state starts as one number and k - 1 empty sets.

Example: [8, 7, 6, 5, 4] into 2: 8|7 -> spread 1, 6|5 -> 1, 4; 4 meets (8|7): 8|11 -> 3;
then 6|5: 8+6 | 11+5 -> 14 | 16.

What makes it fast: a set is one Python integer, sum then count then first member, so that one
comparison breaks ties as comparing the sets would; empty sets are not stored, so a lone number
costs one insertion into a sorted list instead of a pass over k sets; members are recovered at
the end by replaying the unions backwards.
"""

import heapq
from bisect import insort
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_planner.errors import UnequalPartitions
from rollout_planner.order import as_lists
from rollout_planner.public.arguments import as_plain
from rollout_planner.types import IntArray

#: A whole number below this is the same as an int64.
_EXACT = float(np.iinfo(np.int64).max // 2)


def get_seqlen_balanced_partitions(
    seqlen_list: Any, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Indices of `seqlen_list` in `k_partitions` sets of nearly equal sums, none of them empty.

    A drop-in for the verl function of this name: lists, arrays or tensors in; ascending lists of
    indices out. Raises UnequalPartitions (an AssertionError) when there are fewer numbers than
    sets, when `equal_size` cannot be, and when a set would stay empty.
    """
    lengths = _integers(seqlen_list)
    if len(lengths) < k_partitions:
        raise UnequalPartitions(
            f"{len(lengths)} items cannot fill {k_partitions} partitions; use fewer partitions"
        )
    partitions = as_lists(_labels(lengths, k_partitions, equal_size), k_partitions)
    for i, members in enumerate(partitions):
        if not members:
            raise UnequalPartitions(
                f"partition {i} of {k_partitions} is empty: items of length 0 add nothing; "
                "remove them or ask for equal sizes"
            )
    return partitions


def karmarkar_karp(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """As `get_seqlen_balanced_partitions`, but sets may be empty. Largest sum first."""
    return as_lists(differencing_labels(seqlen_list, k_partitions, equal_size), k_partitions)


def differencing_labels(seqlen_list: Any, k_partitions: int, equal_size: bool) -> IntArray:
    """The set of each number, int64[n], numbered as `karmarkar_karp` gives them."""
    return _labels(_integers(seqlen_list), k_partitions, equal_size)


def _integers(values: Any) -> list[int]:
    """Lists, arrays and tensors as Python integers, scaled where they are fractions."""
    if isinstance(values, np.ndarray) and _are_whole(values):
        whole: list[int] = values.astype(np.int64).tolist()
        return whole
    plain = as_plain(values)
    if all(isinstance(value, int) for value in plain):
        return [int(value) for value in plain]
    ratios = [float(value).as_integer_ratio() for value in plain]
    scale = max(denominator for _, denominator in ratios)  # powers of two: the largest fits all
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _are_whole(values: NDArray[Any]) -> bool:
    """Whether all are whole numbers, as costs mostly are, and exact as int64."""
    if values.ndim != 1 or values.dtype.kind != "f" or not len(values):
        return False
    least, most = float(values.min()), float(values.max())  # a half has no number like _EXACT
    return most < _EXACT and least >= 0 and bool((values % 1 == 0).all())


def _labels(lengths: list[int], k: int, equal_size: bool) -> IntArray:
    n, bits = len(lengths), len(lengths).bit_length()
    if k < 1:
        raise UnequalPartitions(f"k_partitions is {k}; at least one set is needed")
    if equal_size and n % k:
        raise UnequalPartitions(f"{n} items do not split into {k} partitions of equal size")
    if k == 1 or n == 0:
        return np.zeros(n, dtype=np.int64)
    shift, one, mask = 2 * bits, 1 << bits, (1 << bits) - 1
    keys = sorted([length << shift | one | i for i, length in enumerate(lengths)])
    states = [keys[i : i + k] for i in range(0, n, k)] if equal_size else []
    heads, unions = _merged(states, [] if states else keys, k, shift, mask)
    label = [0] * n
    for rank, head in enumerate(sorted(heads, reverse=True)):
        label[head & mask] = rank
    for kept, absorbed in reversed(unions):
        label[absorbed] = label[kept]
    return np.array(label, dtype=np.int64)


def _merged(
    states: list[list[int]], keys: list[int], k: int, shift: int, mask: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """The k sets that full states, or lone numbers, end in, and the first members that met.

    A state is the rising keys of its non-empty sets. keys: of lone numbers, rising, which wait in
    this list, not in the heap. shift: of a key's sum. mask: of its first member.
    """
    unions = list[tuple[int, int]]()

    def entry(state: list[int]) -> tuple[tuple[int, int], list[int]]:
        """The largest spread first, then the largest set."""
        low = state[0] >> shift if len(state) == k else 0
        return (low - (state[-1] >> shift), -state[-1]), state

    def pop() -> list[int]:
        if keys and (not heap or (-(keys[-1] >> shift), -keys[-1]) < heap[0][0]):
            return [keys.pop()]
        return heapq.heappop(heap)[1]

    heap = list(map(entry, states))
    heapq.heapify(heap)
    while len(heap) + len(keys) > 1:
        first, second = pop(), pop()
        # The largest of the second meets the smallest of the first, or an empty set: so many meet
        # as are too many, and the union keeps the first member of the one.
        overlap = len(first) + len(second) - k
        if len(second) == overlap == 1:
            a, b = first.pop(0), second[0]
            unions.append((a & mask, b & mask))
            insort(first, a + b - (b & mask))
        elif overlap > 0:
            pairs = list(zip(first[:overlap], reversed(second[:overlap]), strict=True))
            unions += [(a & mask, b & mask) for a, b in pairs]
            met = [a + b - (b & mask) for a, b in pairs]
            first = sorted(met + first[overlap:] + second[overlap:])
        else:
            first = sorted(first + second)
        heapq.heappush(heap, entry(first))
    return pop(), unions
