"""Up to two samples of a micro-batch for up to two of another, while that shortens the step.

Invariant: as many micro-batches as before, none of them empty that was not; no trade lengthens the
step, or takes a micro-batch beyond its budget.

Where budgets are nearly full, a swap of single samples has to keep tokens, so it keeps cost as
well. One long sample for two short ones of as many tokens keeps tokens, and changes cost.

Example, budget 10, R = 2, one micro-step, cost tokens squared: 8 2 | 4 4 1 1 are 68 and 34. No swap
of single samples shortens that but 2 for 1; 2 for 1 1 and then 8 for 4 4 only turn it around.
"""

from collections.abc import Sequence

import numpy as np

from rollout_dispatcher.balance import tuning
from rollout_dispatcher.balance.split.leveling import spread_columns
from rollout_dispatcher.balance.split.parts import Batch, Parts, matrix
from rollout_dispatcher.balance.work import Work
from rollout_dispatcher.plan import BoolArray, FloatArray, IntArray, Layout, PlanConfig, Sync

_EMPTY = tuning.TRADED_FROM
#: Slots of what a micro-batch may give: two of the samples looked at, one (beside an empty slot),
#: or none.
_ONE, _OTHER = (np.append(each, _EMPTY) for each in np.triu_indices(_EMPTY + 1, 1))
#: So small that it decides between equals only.
_LITTLE = 1e-6


def traded(
    batch: Batch, starts: Sequence[Parts], config: PlanConfig, enough: float, work: Work
) -> Parts:
    """The best of these after trades, until the step takes `enough` or there is no work left."""
    trades = min((_Trades(batch, parts, config) for parts in starts), key=_Trades.time)
    turn = stalled = 0
    while stalled < tuning.TRADE_PATIENCE * trades.columns and trades.time() > enough:
        if not work.affords(tuning.TRADE):
            break
        if trades.make_one(turn):
            stalled = 0
        else:
            turn, stalled = turn + 1, stalled + 1
    return trades.parts()


class _Trades:
    """Bins, which are micro-batches, and what each unit costs that waits for others.

    A unit is a bin, or a rank where these meet once a step. A column is R units of like cost, which
    wait for each other.
    """

    def __init__(self, batch: Batch, parts: Parts, config: PlanConfig) -> None:
        self.R, self.M = parts.counts.shape
        self.per_step = config.sync is Sync.STEP
        self.columns = 1 if self.per_step else self.M
        budget, sizes = config.micro_batch_tokens or 1, parts.counts.ravel()
        #: With the empty slot, at `nobody`.
        self.cost, self.nobody = np.append(batch.cost, 0.0), len(batch)
        self.tokens = np.append(np.minimum(batch.tokens, budget), 0)
        self.bins = [each.tolist() for each in np.split(parts.sequence, np.cumsum(sizes)[:-1])]
        bin_of = np.repeat(np.arange(len(sizes)), sizes)
        held = np.bincount(bin_of, weights=self.tokens[parts.sequence], minlength=len(sizes))
        self.room = budget - held
        self.unit = np.arange(len(sizes)) // (self.M if self.per_step else 1)
        costs = matrix(batch, parts, Layout.PACKED)
        self.load = costs.sum(axis=1) if self.per_step else costs.ravel()
        self._sort()

    def _sort(self) -> None:
        order = np.argsort(-self.load, kind="stable")
        self.order = order.reshape(self.columns, self.R)
        self.levels = self.load[self.order]
        self.column = np.empty(len(self.load), dtype=np.int64)
        self.column[order] = np.arange(len(order)) // self.R

    def time(self) -> float:
        """What the step takes."""
        return float(self.levels[:, 0].sum())

    def make_one(self, turn: int) -> bool:
        """The best trade of a column's dearest unit, each column's in turn; whether one gains."""
        column = turn % self.columns
        high = int(self.order[column, 0])
        a = high * self.M + turn % self.M if self.per_step else high
        others = self._partners(turn)
        mine, theirs = self._samples([a], turn), self._samples(others.tolist(), turn)
        dearer = _differences(self.cost, mine, theirs)
        more = _differences(self.tokens, mine, theirs)
        after = self._after(column, self.unit[others], dearer)
        after[(more > self.room[others, None, None]) | (-more > self.room[a])] = np.inf
        self._keep_some(after, a, others, mine, theirs)
        best = int(after.argmin())
        if not after.ravel()[best] < self.levels[column, 0]:
            return False
        p, one, other = (int(i) for i in np.unravel_index(best, after.shape))
        b = int(others[p])
        self._swap(a, b, mine[0, [_ONE[one], _OTHER[one]]], theirs[p, [_ONE[other], _OTHER[other]]])
        self.load[high] -= dearer[p, one, other]
        self.load[self.unit[b]] += dearer[p, one, other]
        self.room[a] += more[p, one, other]
        self.room[b] -= more[p, one, other]
        self._sort()
        return True

    def _partners(self, turn: int) -> IntArray:
        """Bins of the units that are furthest below those they wait for; later turns, other bins."""
        slack = self.levels[self.column, 0] - self.load
        slack[self.order[:, 0]] = -1.0  # whom others wait for
        slack = slack[self.unit]
        found = np.argsort(-slack, kind="stable")[: np.count_nonzero(slack >= 0)]
        return np.roll(found, -(turn // self.columns) * tuning.TRADE_PARTNERS)[: tuning.TRADE_PARTNERS]

    def _samples(self, bins: list[int], turn: int) -> IntArray:
        """Samples of each bin that are looked at, int64[bins, slots], other ones in each turn."""
        rows = []
        for b in bins:
            held: list[int] = self.bins[b]
            if len(held) > _EMPTY:
                held = [held[(i * len(held) // _EMPTY + turn) % len(held)] for i in range(_EMPTY)]
            rows.append(held + [self.nobody] * (_EMPTY + 1 - len(held)))
        return np.array(rows, dtype=np.int64)

    def _after(self, column: int, units: IntArray, dearer: FloatArray) -> FloatArray:
        """What this column costs after each trade; inf where another one would cost more.

        dearer: float64[partner, given, taken], by how much what is given is.
        """
        levels, same = self.levels[column], self.column[units] == column
        third = levels[2] if self.R > 2 else 0.0
        rest = np.where(units == self.order[column, 1], third, levels[1])
        after = levels[0] - dearer
        theirs = dearer + self.load[units, None, None]
        after[same] = np.maximum(after[same], theirs[same])
        most = np.where(same, np.inf, self.levels[self.column[units], 0])
        # Of trades that are as good, what takes most off, or levels the two best.
        after = np.maximum(after, rest[:, None, None]) + _LITTLE * after
        after[theirs > most[:, None, None]] = np.inf
        return after

    def _keep_some(
        self, after: FloatArray, a: int, others: IntArray, mine: IntArray, theirs: IntArray
    ) -> None:
        """No trade leaves a bin empty."""
        left = len(self.bins[a]) - self._count(mine[0])
        taken = self._count(theirs)
        for p, b in enumerate(others.tolist()):
            if left.min() < 1:
                after[p][np.ix_(left < 1, taken[p] < 1)] = np.inf
            if len(self.bins[b]) < 3:
                emptied = taken[p] >= len(self.bins[b])
                after[p][np.ix_(left >= len(self.bins[a]), emptied)] = np.inf

    def _count(self, samples: IntArray) -> IntArray:
        there = (samples < self.nobody).astype(np.int64)
        counts: IntArray = there[..., _ONE] + there[..., _OTHER]
        return counts

    def _swap(self, a: int, b: int, gives: IntArray, takes: IntArray) -> None:
        for source, to, samples in ((a, b, gives), (b, a, takes)):
            for i in samples[samples < self.nobody].tolist():
                self.bins[source].remove(i)
                self.bins[to].append(i)

    def parts(self) -> Parts:
        """Bins of like cost share a micro-step."""
        R, M = self.R, self.M
        bins = np.arange(R * M)
        if not self.per_step:
            place = spread_columns(self.levels) * M + np.arange(M)[:, None]
            bins[place.ravel()] = self.order.ravel()
        held = [self.bins[b] for b in bins.tolist()]
        counts = np.array([len(each) for each in held], dtype=np.int64).reshape(R, M)
        return Parts(np.array([i for each in held for i in each], dtype=np.int64), counts)


def _differences(of: "FloatArray | IntArray", mine: IntArray, theirs: IntArray) -> FloatArray:
    """What is given less what is taken, [partner, given, taken]."""
    one, other = of[mine], of[theirs]
    gives, takes = one[:, _ONE] + one[:, _OTHER], other[:, _ONE] + other[:, _OTHER]
    out: FloatArray = gives[:, :, None] - takes[:, None, :]
    return out
