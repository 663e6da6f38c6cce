"""How few bins may hold all items under a token budget.

Invariant: `least_bins` never exceeds the bins of a legal packing.

The bound is Martello & Toth's L2 (1990). For any a: items above budget - a stand alone, each of
the others above half the budget has a bin to itself, and the items from a to half the budget go
where these leave room, or into more bins.
Example, budget 10, items 7 7 6 4 2: their sum is 26, so 3 bins; with a = 4, the 7s stand alone,
6 4 are full, and as 2 is below a, L2 is 3 as well. With 7 7 6 4 4 it is 4.
"""

import numpy as np

from rollout_planner.order import running_sums
from rollout_planner.split.assign import Labels
from rollout_planner.types import IntArray


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


def num_bins(labels: Labels) -> int:
    """Bins of a packing numbered from 0."""
    return int(labels.max(initial=-1)) + 1
