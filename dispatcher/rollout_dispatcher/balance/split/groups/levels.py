"""Micro-batches of ranks that keep their samples: equal cost at equal index.

Invariant: ranks keep their samples; a micro-batch holds at most `cap` of what its samples weigh
(one each, or tokens), or a single sample that alone exceeds it.

Ranks that wait at every micro-step agree on what each should cost: the largest sample that any
rank has left, or an even share of what the most loaded rank has left. Each rank fills its
micro-batches to these levels, swaps level what is left, and all sort by cost. Where ranks meet
once a step, or pad, only their sums count.

Example: ranks with costs 9 2 1 and 6 3 3, M = 2: the levels are 9 and 3, so 9 | 2 1 beside 6 3 | 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.split.best_fit import best_fit
from rollout_dispatcher.balance.split.budget_fit import lpt_budget
from rollout_dispatcher.balance.split.karmarkar_karp import differencing_labels
from rollout_dispatcher.balance.split.leveling import swap_level
from rollout_dispatcher.balance.split.packing import members
from rollout_dispatcher.balance.split.parts import Batch, Parts, evenly
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import FloatArray, IntArray

#: Micro-batch of each sample, for each rank.
Own = list[IntArray]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Samples of each rank by falling cost: ids int64[R, p], n where there is none.

    cost: float64[R, p]. weight: int64[R, p], what counts against a micro-batch's cap; both are 0
    where there is none. sizes: int64[R]. n: samples of the batch.
    """

    ids: IntArray
    cost: FloatArray
    weight: IntArray
    sizes: IntArray

    @classmethod
    def of(cls, batch: Batch, weight: IntArray, rank_of: IntArray, R: int) -> "Ranks":
        """rank_of: int64[n], the rank of each sample."""
        n, ranks = len(batch), rank_of[batch.order]
        sizes = np.bincount(ranks, minlength=R)
        by_rank = np.argsort(ranks, kind="stable")
        ids = np.full((R, int(sizes.max())), n, dtype=np.int64)
        place = np.arange(n) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        ids[ranks[by_rank], place] = batch.order[by_rank]
        return cls(ids, np.append(batch.cost, 0.0)[ids], np.append(weight, 0)[ids], sizes)

    @property
    def heaviest(self) -> int:
        """What the rank with the heaviest samples has of them."""
        return int(self.weight.sum(axis=1).max())

    def own(self) -> Iterator[tuple[FloatArray, IntArray]]:
        """Costs and weights of each rank's samples."""
        for cost, weight, p in zip(self.cost, self.weight, self.sizes.tolist(), strict=True):
            yield cost[:p], weight[:p]

    def slots(self, M: int, m: int) -> IntArray:
        """The ids with empty slots up to M * m of each rank."""
        R, p = self.ids.shape
        empty = np.full((R, M * m - p), int(self.sizes.sum()))
        return np.concatenate((self.ids, empty), axis=1)


def agreed_levels(cost: FloatArray, M: int, *, single: bool = False) -> FloatArray:
    """What each of M micro-steps should cost, falling, for cost[R, p] of each rank's samples.

    Their sum is what the step takes if samples could be cut, all but the j-th largest of micro-step
    j. single: a micro-batch is one sample, so there is nothing to share.
    """
    largest = np.zeros(M)
    largest[: cost.shape[1]] = cost.max(axis=0)[:M]
    if single:
        return largest
    left = float(cost.sum(axis=1).max())
    levels = np.zeros(M)
    for j in range(M):
        levels[j] = max(float(largest[j]), left / (M - j))
        left = max(left - levels[j], 0.0)
    return levels


def dealt(ranks: Ranks, M: int, m: int) -> Parts:
    """Samples dealt in turn over the micro-batches of their rank, so that these are alike."""
    m = min(m, -(-ranks.ids.shape[1] // M))  # slots beyond are empty, and may be any number
    slots = ranks.slots(M, m).reshape(-1, m, M).transpose(0, 2, 1)
    return Parts.of_slots(slots, int(ranks.sizes.sum()))


def runs(ranks: Ranks, M: int, m: int) -> list[Parts]:
    """Neighbours in cost together; where there are too few, the last or the first lacks some.

    Where that leaves a micro-batch empty, also as many in each as in the others, or one more in the
    cheaper ones: beside the longest every sample is padded to it.
    """
    m = min(m, ranks.ids.shape[1])  # a rank's samples share one micro-batch at most
    n, slots = int(ranks.sizes.sum()), ranks.slots(M, m)
    found = [Parts.of_slots(slots.reshape(-1, M, m), n)]
    full = -(-ranks.sizes // m) * m
    if (full != ranks.sizes).any():
        place = (np.arange(M * m) - (full - ranks.sizes)[:, None]) % (M * m)
        found.append(Parts.of_slots(np.take_along_axis(slots, place, 1).reshape(-1, M, m), n))
    if (ranks.sizes <= (M - 1) * m).any():
        has = evenly(ranks.sizes, M)
        place = (has.cumsum(axis=1) - has)[:, :, None] + np.arange(m)
        place[np.arange(m) >= has[:, :, None]] = M * m  # none
        more = np.append(slots, np.full((len(slots), 1), n), axis=1)
        even = np.take_along_axis(more, place.reshape(len(slots), -1), 1)
        found.append(Parts.of_slots(even.reshape(-1, M, m), n))
    return found


def filled(ranks: Ranks, M: int, cap: int, levels: FloatArray | None, work: Work) -> Parts | None:
    """M micro-batches a rank, sorted by cost; None if a rank finds no way.

    levels: what each should cost; None where only the sums of ranks count. work: pays for a second
    way to fill them.
    """
    has = ranks.ids < ranks.sizes.sum()
    x, w = np.append(ranks.cost[has], 0.0), np.append(ranks.weight[has], 0)
    n, R, below = len(x) - 1, len(ranks.ids), np.zeros(M) if levels is None else levels[0] - levels

    def built(own: Own) -> tuple[float, IntArray]:
        """Time, if that is asked for, and bins int64[R, M, slots]."""
        labels = np.concatenate([labels + r * M for r, labels in enumerate(own)])
        bins = members(labels, R * M).reshape(R, M, -1)
        return (0.0, bins) if levels is None else _levelled(bins, x, w, cap, levels)

    own = _to_levels(ranks, cap, below)
    best = None if own is None else built(own)
    even = levels is None or levels[-1] >= tuning.EVEN_LEVELS * levels[0]
    again = even and w.max() > 1 and n <= tuning.MANY_IN_GROUPS
    if again and best is not None:
        good = np.inf if levels is None else float(levels.sum()) * tuning.UNEVEN_LEVELS
        again = best[0] > good and work.affords(tuning.FILL_BY_DIFFERENCES.of(n, R, M))
    if again:
        other = _by_differences(ranks, cap, below, own)
        if other is not None:
            found = built(other)
            best = found if best is None or found[0] < best[0] else best
    if best is None:
        return None
    held = best[1] < n
    return Parts(ranks.ids[has][best[1][held]], held.sum(axis=2))


def _levelled(
    bins: IntArray, x: FloatArray, w: IntArray, cap: int, levels: FloatArray
) -> tuple[float, IntArray]:
    """Time and micro-batches, bins int64[R, M, slots], after swaps inside ranks.

    Where a rank has too little room to reach the levels, the others had better be uneven as it is:
    then what ranks have on average, sorted, is what all are levelled to.
    """
    best = bins = _falling(bins, x)
    least, good = _time(best, x), float(levels.sum())
    rounds = (
        tuning.GROUP_ROUNDS if len(x) - 1 <= tuning.MANY_IN_GROUPS else tuning.GROUP_ROUNDS_OF_MANY
    )
    for target, over in ((levels, 1.0), (x[bins].sum(axis=2).mean(axis=0), tuning.UNEVEN_LEVELS)):
        if least <= good * (over + 1e-9) or (over > 1 and len(x) - 1 > tuning.MANY_IN_GROUPS):
            break
        swapped = bins.copy()
        base = np.broadcast_to(target[0] - target, bins.shape[:2])
        swap_level(swapped, x, w, cap, base=base, enough=tuning.LEVEL_GROUPS, rounds=rounds)
        swapped = _falling(swapped, x)
        if _time(swapped, x) < least:
            best, least = swapped, _time(swapped, x)
    return least, best


def _falling(bins: IntArray, x: FloatArray) -> IntArray:
    """Each rank's micro-batches by falling cost; bins: int64[R, M, slots]."""
    order = np.argsort(-x[bins].sum(axis=2), axis=1, kind="stable")
    return np.take_along_axis(bins, order[:, :, None], 1)


def _time(bins: IntArray, x: FloatArray) -> float:
    return float(x[bins].sum(axis=2).max(axis=0).sum())


def _to_levels(ranks: Ranks, cap: int, below: FloatArray) -> Own | None:
    """Micro-batch of each of a rank's samples, rank by rank; None if one finds no room.

    below: what each micro-batch should cost less than the first.
    """
    own = []
    for x, w in ranks.own():
        labels = _one_to_levels(x, w, cap, below)
        if labels is None:
            return None
        own.append(labels)
    return own


def _one_to_levels(x: FloatArray, w: IntArray, cap: int, below: FloatArray) -> IntArray | None:
    """Micro-batch of each of one rank's samples: to the levels, evenly by weight, or tightly."""
    M = len(below)
    labels = lpt_budget(x, w, M, cap, start=below)
    if labels is None and below.any():
        labels = lpt_budget(x, w, M, cap)
    if labels is None:
        labels = lpt_budget(w.astype(np.float64), w, M, cap)
    if labels is None:
        labels = best_fit(w, np.full(M, cap), cap)
    return None if labels.min(initial=0) < 0 else labels


def _by_differences(ranks: Ranks, cap: int, below: FloatArray, plain: Own | None) -> Own | None:
    """By unequal KK, more even where few samples share a micro-batch; if too heavy as `plain`.

    None if that is everywhere, or if there is no plain way.
    """
    M, own, is_new = len(below), [], False
    for r, (x, w) in enumerate(ranks.own()):
        labels = differencing_labels(x, M, equal_size=False)
        fits = bool(np.bincount(labels, weights=w, minlength=M).max() <= cap)
        is_new |= fits
        found = labels if fits else _one_to_levels(x, w, cap, below) if plain is None else plain[r]
        if found is None:
            return None
        own.append(found)
    return own if is_new else None
