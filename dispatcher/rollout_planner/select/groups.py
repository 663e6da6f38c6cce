"""Groups that leave together: whole groups are chosen, exactly `take` samples where sizes allow.

Invariant: a group is taken whole or not at all; the total is the largest that whole groups can
reach within `take`, given those that are due.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_planner.types import BoolArray, IntArray

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
    """Largest value of each group's members."""
    order = np.argsort(index, kind="stable")
    starts = np.flatnonzero(np.diff(index[order], prepend=-1))
    largest: NDArray[Number] = np.maximum.reduceat(values[order], starts)
    return largest


def fill_exactly(preferred: IntArray, forced: BoolArray, size: IntArray, take: int) -> BoolArray:
    """Whole groups, in order of preference, that together come as close to `take` as can be.

    Subset sums as bits of one integer: bit t of reach[i] says that the groups from the i-th on
    can total t samples. A group is taken if the best total can still be reached after it.
    Example: sizes 3 2 2 in this order, take 4: 4 can be reached by 2 + 2 only, so 3 is left out.
    """
    chosen = np.zeros(len(size), dtype=bool)
    for g in preferred[forced[preferred]].tolist():
        if size[g] <= take:
            chosen[g] = True
            take -= int(size[g])
    rest = preferred[~forced[preferred]]
    sizes = size[rest].tolist()
    mask = (1 << (take + 1)) - 1
    reach = [1]
    for count in reversed(sizes):
        reach.append((reach[-1] | reach[-1] << count) & mask)
    reach.reverse()
    left = reach[0].bit_length() - 1
    for g, count, after in zip(rest.tolist(), sizes, reach[1:], strict=True):
        if count <= left and after >> (left - count) & 1:
            chosen[g] = True
            left -= count
    return chosen
