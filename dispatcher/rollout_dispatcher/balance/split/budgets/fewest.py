"""How few bins hold all items under a token budget: what surely needs more, and what does.

Invariant: `least_bins` never exceeds the bins of a legal packing, and `TightPackings` are such.

The bound is Martello & Toth's L2 (1990). For any a: items above budget - a stand alone, each of
the others above half the budget has a bin to itself, and the items from a to half the budget go
where these leave room, or into more bins.
Example, budget 10, items 7 7 6 4 2: their sum is 26, so 3 bins; with a = 4, the 7s stand alone,
6 4 are full, and as 2 is below a, L2 is 3 as well. With 7 7 6 4 4 it is 4.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import count, islice

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.order import running_sums
from rollout_dispatcher.balance.split.best_fit import best_fit
from rollout_dispatcher.balance.split.budget_fit import Labels
from rollout_dispatcher.plan import IntArray


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


class TightPackings:
    """Bins of each item of falling `s`, numbered from 0: by best fit, and by first fit.

    Each is made when it is first asked for, and kept. came: place of each item in order of arrival,
    for a first fit in that order as well.
    """

    def __init__(self, s: IntArray, budget: int, came: IntArray | None = None) -> None:
        self._found: list[Labels] = []
        self._others = self._made(s, budget, came)

    def __iter__(self) -> Iterator[Labels]:
        for at in count():
            if at == len(self._found):
                self._found += islice(self._others, 1)
            if at == len(self._found):
                return
            yield self._found[at]

    @staticmethod
    def _made(s: IntArray, budget: int, came: IntArray | None) -> Iterator[Labels]:
        yield best_fit(s, np.full(len(s), budget), budget)
        if len(s) <= tuning.DECREASING_UP_TO:
            yield _first_fit_decreasing(s, budget)
        if came is not None and len(s) <= tuning.BY_ARRIVAL_UP_TO:
            yield _first_fit(s, budget, np.argsort(came))


def num_bins(labels: Labels) -> int:
    """Bins of a packing numbered from 0."""
    return int(labels.max(initial=-1)) + 1


def fewest_members_fit(s: IntArray, budget: int) -> Labels:
    """Each item where there are fewest and there is room, or into a new bin."""
    room, counts, bins = np.full(len(s), budget), np.zeros(len(s), dtype=np.int64), 0
    labels = []
    for tokens in np.minimum(s, budget).tolist():
        fits = np.flatnonzero(room[:bins] >= tokens)
        b = int(fits[np.lexsort((-room[fits], counts[fits]))[0]]) if len(fits) else bins
        bins = max(bins, b + 1)
        room[b] -= tokens
        counts[b] += 1
        labels.append(b)
    return np.array(labels, dtype=np.int64)


def _first_fit_decreasing(s: IntArray, budget: int) -> Labels:
    """Bin after bin takes the largest item that fits until none does, which is the same."""
    falling, n = (-np.minimum(s, budget)).tolist(), len(s)
    after = list(range(n + 1))  # leads to the first unused item at or after i

    def unused(i: int) -> int:
        while after[i] != i:
            after[i] = i = after[after[i]]
        return i

    labels, b = [0] * n, 0
    while unused(0) < n:
        room = budget
        while (i := unused(bisect_left(falling, -room))) < n:
            labels[i] = b
            after[i] = i + 1
            room += falling[i]
        b += 1
    return np.array(labels, dtype=np.int64)


def _first_fit(s: IntArray, budget: int, sequence: IntArray) -> Labels:
    """Each item into the first bin with room; a tree of the most room below each node finds it."""
    leaves = 1 << max(len(s) - 1, 0).bit_length()
    most = [budget] * (2 * leaves)
    tokens, labels = np.minimum(s, budget).tolist(), [0] * len(s)
    for i in sequence.tolist():
        node = 1
        while node < leaves:
            node *= 2
            node += most[node] < tokens[i]
        labels[i] = node - leaves
        most[node] -= tokens[i]
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return np.array(labels, dtype=np.int64)
