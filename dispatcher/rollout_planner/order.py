"""Sorting by tokens, the one order that everything else is built on; and sums along it.

Invariant: falling tokens, ties by position; as cost is monotone in tokens, cost falls as well.
"""

from typing import TypeVar

import numpy as np

from rollout_planner.types import BoolArray, FloatArray, IntArray

_Numbers = TypeVar("_Numbers", IntArray, FloatArray)


def by_falling_tokens(tokens: IntArray) -> IntArray:
    """Positions by falling tokens, then by position.

    Of numbers of 16 bits numpy sorts by radix, several times as fast as of longer ones, so that
    those of 32 are sorted twice: by their lower half, then by the upper one.
    """
    falls = np.maximum.reduce(tokens, initial=0) - tokens
    most = int(np.maximum.reduce(falls, initial=0))
    order: IntArray = falls.astype(np.uint16).argsort(kind="stable")
    if upper := most >> 16:
        high = falls[order] >> 16
        short = high.astype(np.uint16) if upper < 1 << 16 else high
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
    short = labels.astype(np.int16) if count <= 1 << 15 else labels
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
