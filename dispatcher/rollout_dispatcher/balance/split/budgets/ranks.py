"""Packing where ranks meet once a step: what counts is the most that a rank has in all.

Invariant: a micro-batch holds at most `budget` tokens, or a single item that alone exceeds it; all
ranks have the same number M of them, the smallest that is found.

Two ways, the better of which stays. Samples go to ranks by cost, largest first onto the least
loaded, as far as a rank's M budgets go, and each rank packs its own; what finds no room there goes
where there is some. Or bins, as few as can be, go to ranks, M to each, so that their sums are
close. In both, swaps between ranks, in and out of micro-batches with room, level what is left.

Example, R = 2, budget 10, tokens 10 6 5 5 3 2 1, cost tokens squared: 32 tokens need M = 2. By
cost 10 2 | 6 5 5 3 1 are 104 and 96, and the second rank packs as 6 3 1 and 5 5.
"""

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.bounds import rank_bound
from rollout_dispatcher.balance.split.best_fit import best_fit
from rollout_dispatcher.balance.split.budget_fit import Labels, lpt_budget
from rollout_dispatcher.balance.split.budgets.fewest import TightPackings, num_bins
from rollout_dispatcher.balance.split.budgets.fillers import fill_empty
from rollout_dispatcher.balance.split.leveling import swap_level
from rollout_dispatcher.balance.split.packing import (
    fewest_micro_batches,
    fill,
    is_scarce,
    members,
    too_many_slots,
)
from rollout_dispatcher.balance.split.partition import bins_onto_ranks, step_partition
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import Allowed, BoolArray, FloatArray, IntArray


def pack_ranks(
    x: FloatArray,
    s: IntArray,
    R: int,
    budget: int,
    allowed: Allowed = int,
    *,
    came: IntArray | None = None,
    work: Work,
) -> tuple[Labels, int]:
    """Micro-batch of each item, numbered rank by rank, and M. Items descend in cost and in tokens.

    came: place of each item in order of arrival, for a first fit in that order as well. work: pays
    for trying more packings.
    """
    M = allowed(fewest_micro_batches(s, R, budget))
    ranks = _Ranks(x, np.minimum(s, budget), R, M, budget)
    found = [] if is_scarce(s, R * M, budget) else ranks.by_samples()
    if found and ranks.close(found):
        return found[0], M
    packings = TightPackings(s, budget, came)
    bins, fewest = fill(x, s, R, budget, allowed, packings=packings)
    if not found:
        M, ranks = fewest, _Ranks(x, ranks.t, R, fewest, budget)
        found = [ranks.by_bins(each) for each in bins]
        if not ranks.close(found):
            found += ranks.by_samples()
    elif fewest == M:
        found += [ranks.by_bins(each) for each in bins]
    if not ranks.close(found, tuning.WORTH_PACKINGS):
        found += ranks.by_packings(packings, bins if fewest == M else [], work)
    return min(found, key=ranks.time), M


class _Ranks:
    """The ways to fill R ranks of M micro-batches; `t`, the tokens, are at most the budget."""

    def __init__(self, x: FloatArray, t: IntArray, R: int, M: int, budget: int) -> None:
        self.x, self.t, self.R, self.M, self.budget = x, t, R, M, budget
        #: Some rank has the mean, and one the largest item and one in each other micro-batch.
        company = float(x[len(x) - M + 1 :].sum()) if len(x) >= R * M else 0.0
        self.bound = max(rank_bound(x, R), float(x[0]) + company)
        #: With the empty slot that swaps use.
        self.costs, self.tokens = np.append(x, 0.0), np.append(t, 0)

    def close(self, found: list[Labels], enough: float = tuning.CLOSE_TO_BOUND) -> bool:
        """Whether one of these is so near to the bound that nothing else need be tried."""
        return min(map(self.time, found)) <= self.bound * (1 + enough)

    def time(self, labels: Labels) -> float:
        """The largest rank's sum."""
        return float(np.bincount(labels // self.M, weights=self.x).max())

    def by_samples(self) -> list[Labels]:
        """Samples onto ranks, then into micro-batches, in the ways that find room for all.

        By cost; and as many to each, where some rank would have fewer than micro-batches.
        """
        R, M, n = self.R, self.M, len(self.x)
        rank = lpt_budget(self.x, self.t, R, M * self.budget)
        if rank is None:
            return []
        ids = members(rank, R)
        swap_level(ids[None], self.costs, self.tokens, M * self.budget)
        ways = [ids]
        if n >= R * M and (ids < n).sum(axis=1).min() < M:
            each = -(-n // R)
            x = np.append(self.x, np.zeros(R * each - n))
            ways.append(step_partition(x, R, 1, each)[:, 0])
        found = [labels for ids in ways if (labels := self._pack(ids)) is not None]
        return sorted(found, key=self.time)

    def _pack(self, ids: IntArray) -> Labels | None:
        """Ranks' samples, ids[R, any] with n or more for none, into micro-batches with room."""
        R, M = ids.shape[0], self.M
        labels = np.empty(len(self.x) + 1, dtype=np.int64)
        rows, left = np.sort(np.minimum(ids, len(self.x)), axis=1), list(range(R))
        if M == 1:
            if self.tokens[rows].sum(axis=1).max() > self.budget:
                return None
            labels[rows] = np.arange(R)[:, None]
            return self._filled(labels[:-1])
        alike = R < tuning.RANKS_BY_ROWS
        if not alike:
            own, fits = self._pack_rows(rows)
            labels[rows] = own + np.arange(0, R * M, M)[:, None]
            left = np.flatnonzero(~fits).tolist()
        for r in left:
            items = rows[r][rows[r] < len(self.x)]
            own = _pack_own(self.x[items], self.t[items], M, self.budget, alike=alike)
            labels[items] = np.where(own < 0, -1, own + r * M)
        labels = labels[:-1]
        if labels.min() < 0:
            if not self._place_left(labels):
                return None
            labels = self._level(labels)
        return self._filled(labels)

    def _pack_rows(self, rows: IntArray) -> tuple[IntArray, BoolArray]:
        """Items of all ranks at once, largest onto least loaded, and which ranks have the room."""
        R, M = len(rows), self.M
        loads, room, fits = np.zeros((R, M)), np.full((R, M), self.budget), np.ones(R, np.bool_)
        own, rank = np.empty_like(rows), np.arange(R)
        for p, items in enumerate(rows.T):
            tokens = self.tokens[items]
            open_loads = np.where(room >= tokens[:, None], loads, np.inf)
            own[:, p] = b = open_loads.argmin(axis=1)
            loads[rank, b] += self.costs[items]
            room[rank, b] -= tokens
            fits &= room[rank, b] >= 0
        return own, fits

    def by_bins(self, bins: Labels) -> Labels:
        """R * M bins onto ranks, M to each."""
        R, M = self.R, self.M
        load = np.bincount(bins, weights=self.x, minlength=R * M).astype(np.float64)
        return self._filled(self._level(bins_onto_ranks(load, R, M)[bins]))

    def by_packings(self, packings: TightPackings, tried: list[Labels], work: Work) -> list[Labels]:
        """The same with bins filled by tokens alone, of the ways that need no more."""
        found, tried = [], list(tried)
        price = tuning.BINS_ONTO_RANKS.of(len(self.x), self.R, self.M)
        for bins in packings:
            if num_bins(bins) > self.R * self.M or any(np.array_equal(bins, at) for at in tried):
                continue
            if not work.affords(price):
                break
            tried.append(bins)
            found.append(self.by_bins(bins))
        return found

    def _filled(self, labels: Labels) -> Labels:
        """Without needless empty micro-batches."""
        counts = np.bincount(labels, minlength=self.R * self.M)
        if counts.min() == 0:
            sequence, counts = fill_empty(
                np.argsort(labels, kind="stable"),
                counts.reshape(self.R, self.M),
                self.x,
                halve=True,
                across=True,
            )
            labels = np.empty_like(labels)
            labels[sequence] = np.repeat(np.arange(self.R * self.M), counts.ravel())
        return labels

    def _place_left(self, labels: Labels) -> bool:
        """Put items without label, in place, where there is room, on the least loaded rank."""
        placed, M = labels >= 0, self.M
        bins = self.R * M
        held = np.bincount(labels[placed], weights=self.t[placed], minlength=bins)
        room = self.budget - held.astype(np.int64)
        load = np.bincount(labels[placed] // M, weights=self.x[placed], minlength=self.R)
        for i in np.flatnonzero(~placed).tolist():
            fits = np.flatnonzero(room >= self.t[i])
            if not len(fits):
                return False
            labels[i] = b = fits[load[fits // M].argmin()]
            room[b] -= self.t[i]
            load[b // M] += self.x[i]
        return True

    def _level(self, labels: Labels) -> Labels:
        """Swaps between ranks, in and out of micro-batches with room."""
        R, M = self.R, self.M
        if too_many_slots(labels, R * M):
            return labels
        ids = members(labels, R * M)
        by_rank = ids.reshape(1, R, -1)
        swap_level(
            by_rank, self.costs, self.tokens, self.budget, parts=M, rounds=tuning.RANK_ROUNDS
        )
        swapped = np.empty(len(self.costs), dtype=np.int64)
        swapped[by_rank.reshape(ids.shape)] = np.arange(R * M)[:, None]
        return swapped[:-1]


def _pack_own(x: FloatArray, t: IntArray, M: int, budget: int, *, alike: bool) -> Labels:
    """A rank's items into its micro-batches, alike if they can be, or by best fit; -1: no room."""
    labels = lpt_budget(x, t, M, budget) if alike else None
    return best_fit(t, np.full(M, budget), budget) if labels is None else labels
