"""Fits: bins are opened only where an item finds no room, so few are needed.

Invariant: a bin holds at most `budget` tokens, or one item that alone exceeds it.

Best fit and first fit decreasing need at most 11/9 of the fewest bins and a little (Johnson 1974);
which needs fewer depends on the items, and so does which is more even. Example, budget 10, items
6 5 4 4: best fit 6 4 | 5 4; of 6 5 5 4, first fit 6 4 | 5 5.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from rollout_dispatcher.balance.split.budget_fit import Labels
from rollout_dispatcher.plan import IntArray


def every_fit(s: IntArray, came: IntArray, budget: int, *, thorough: bool) -> Iterator[Labels]:
    """Labels, int64[n], of falling `s` by each fit; where one will do, unless `thorough`, no more.

    came: where each item stood before they were sorted.
    """
    best = _best_fit(s, budget)
    yield best
    if thorough or best.max() >= least_bins(s, budget):
        yield _first_fit(s, budget, np.arange(len(s)))
    if thorough:
        yield _first_fit(s, budget, np.argsort(came, kind="stable"))
        yield _fewest_members_fit(s, budget)


def least_bins(s: IntArray, budget: int) -> int:
    """No packing has fewer; an item above the budget has a bin to itself."""
    return max(-(-int(np.minimum(s, budget).sum()) // budget), min(len(s), 1))


def _best_fit(s: IntArray, budget: int) -> Labels:
    """Each item where it leaves the least room, or into a new bin."""
    rooms: list[tuple[int, int]] = []
    labels = []
    for tokens in s.tolist():
        at = bisect_left(rooms, (tokens, -1))
        left, b = rooms.pop(at) if at < len(rooms) else (budget, len(rooms))
        labels.append(b)
        insort(rooms, (max(left - tokens, 0), b))
    return np.array(labels, dtype=np.int64)


def _first_fit(s: IntArray, budget: int, sequence: IntArray) -> Labels:
    """Each item into the first bin with room, or into a new one."""
    room, labels = np.full(len(s), budget), np.empty(len(s), dtype=np.int64)
    needs = np.minimum(s, budget)
    for item in sequence.tolist():
        b = int((room >= needs[item]).argmax())
        room[b] -= needs[item]
        labels[item] = b
    return labels


def _fewest_members_fit(s: IntArray, budget: int) -> Labels:
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
