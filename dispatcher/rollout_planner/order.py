"""Sorting by tokens, the one order that everything else is built on; and sums along it.

Invariant: falling tokens, ties by position; as cost is monotone in tokens, cost falls as well.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_planner.types import BoolArray, FloatArray, IntArray, cut

_Numbers = TypeVar("_Numbers", IntArray, FloatArray)


def by_falling_tokens(tokens: IntArray) -> IntArray:
    """Positions by falling tokens, then by position.

    Of numbers of 16 bits numpy sorts by radix, several times as fast as of longer ones, so that
    those of 32 are sorted twice: by their lower half, then by the upper one.
    """
    falls = np.maximum.reduce(tokens, initial=0) - tokens
    most = int(np.maximum.reduce(falls, initial=0))
    order: IntArray = falls.astype(np.uint16).argsort(kind="stable")
    bits, short_most = np.iinfo(np.uint16).bits, np.iinfo(np.uint16).max
    if upper := most >> bits:
        high = falls[order] >> bits
        short = high.astype(np.uint16) if upper <= short_most else high
        order = order[short.argsort(kind="stable")]
    return order


def among(order: IntArray, keep: BoolArray) -> IntArray:
    """What a mask keeps of all positions, in the same order, numbered among those that are kept."""
    place = keep.cumsum() - 1
    return place[order[keep[order]]]


def by_label(labels: IntArray, count: int) -> IntArray:
    """Positions by rising label, then by position, where labels are below `count`.

    Of numbers of 16 bits numpy sorts by radix, several times as fast as of longer ones.
    """
    short = labels.astype(np.int16) if count <= np.iinfo(np.int16).max else labels
    return short.argsort(kind="stable")


def falling_place(x: FloatArray) -> IntArray:
    """Place of each number among all by falling value, then by position."""
    place = np.empty(len(x), dtype=np.int64)
    place[np.argsort(-x, kind="stable")] = np.arange(len(x))
    return place


def running_sums(x: _Numbers) -> _Numbers:
    """Sums of the first 0, 1, ... and all items; item i to j-1 sum up to `[j] - [i]`."""
    sums = np.zeros(len(x) + 1, dtype=x.dtype)
    x.cumsum(out=sums[1:])
    return sums


def as_lists(labels: IntArray, k: int) -> list[list[int]]:
    """Ascending indices of each of k labels."""
    if not k:
        return []
    order = np.argsort(labels, kind="stable")
    return cut(order.tolist(), np.bincount(labels, minlength=k).tolist())


def labels_of(parts: list[list[int]], n: int) -> IntArray:
    """Part of each of n items."""
    labels = np.empty(n, dtype=np.int64)
    for number, part in enumerate(parts):
        labels[part] = number
    return labels


Number = TypeVar("Number", np.int64, np.float64)


def group_index(group: IntArray) -> IntArray:
    """Dense group number of each sample, by first arrival; a sample without one is its own."""
    own = np.where(group < 0, group.max(initial=0) + 1 + np.arange(len(group)), group)
    _, first, inverse = np.unique(own, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    dense: IntArray = rank[inverse]
    return dense


def group_max(values: NDArray[Number], index: IntArray) -> NDArray[Number]:
    """Largest value of each group's members; groups are numbered by first arrival."""
    if index[-1] + 1 == len(index):  # each has one
        return values
    order = np.argsort(index, kind="stable")
    starts = np.flatnonzero(np.diff(index[order], prepend=-1))
    largest: NDArray[Number] = np.maximum.reduceat(values[order], starts)
    return largest
