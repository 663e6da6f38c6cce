"""Up to two samples of a micro-batch for up to two of another, while that shortens the step.

Invariant: as many micro-batches as before, none of them empty that was not; no trade lengthens the
step, or takes a micro-batch beyond its budget. Each shortens it, or leaves fewer that are as dear
as the dearest of their micro-step, so trades end.

Where budgets are nearly full, a swap of single samples has to keep tokens, so it keeps cost as
well. One long sample for two short ones of as many tokens keeps tokens, and changes cost.

Example, budget 10, R = 2, one micro-step, cost tokens squared: 8 2 | 4 4 1 1 are 68 and 34. No swap
of single samples shortens that but 2 for 1; 2 for 1 1 and then 8 for 4 4 only turn it around.
"""

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import labels_of
from rollout_planner.split.assign import places_of
from rollout_planner.split.parts import Batch, Parts, Work, room_for
from rollout_planner.types import FloatArray, IntArray, PlanConfig, Sync, cut


def traded(batch: Batch, start: Parts, config: PlanConfig, enough: float, work: Work) -> Parts:
    """These after trades, until the step takes `enough` or there is no work left."""
    tokens, budget = room_for(batch, config)
    per_step = config.sync is Sync.STEP
    trades = _Trades(batch.cost, tokens, start, budget, per_step=per_step)
    trades.make(enough, work)
    return trades.parts()


def traded_bins(x: FloatArray, s: IntArray, labels: IntArray, budget: int) -> IntArray:
    """Bin of each item after trades that make the dearest of all bins cheaper.

    x, s: cost and tokens of each. labels: the bin of each, of which none is empty.
    """
    counts = np.bincount(labels)
    parts = Parts(np.argsort(labels, kind="stable"), counts[:, None])
    trades = _Trades(x, np.minimum(s, budget), parts, budget, per_step=True)
    mean = float(x.sum()) / len(counts)
    trades.make(mean * (1 + tuning.LEVEL), Work(tuning.EVENED))
    return labels_of(trades.bins, len(x))


class _Trades:
    """Bins, which are micro-batches, and what each unit costs that waits for others.

    A unit is a bin, or a rank where these meet once a step. A column is R units of like cost, which
    wait for each other.
    """

    def __init__(
        self, cost: FloatArray, tokens: IntArray, parts: Parts, budget: int, *, per_step: bool
    ) -> None:
        (self.R, self.M), sizes = parts.counts.shape, parts.counts.ravel()
        self.per_step, self.columns = per_step, 1 if per_step else self.M
        #: With the empty slot, at `nobody`.
        self.cost, self.tokens, self.nobody = np.append(cost, 0.0), np.append(tokens, 0), len(cost)
        self.there = (self.tokens > 0).astype(np.int64)
        self.bins = cut(parts.sequence.tolist(), sizes.tolist())
        bin_of, bins = np.repeat(np.arange(len(sizes)), sizes), len(sizes)
        self.room = budget - np.bincount(bin_of, weights=tokens[parts.sequence], minlength=bins)
        self.unit = np.arange(bins) // (self.M if per_step else 1)
        self.load = np.bincount(
            self.unit[bin_of], weights=cost[parts.sequence], minlength=self.R * self.columns
        ).astype(np.float64)
        #: Samples of a bin that are looked at, and the slots of what it may give: two of these, one
        #: (beside an empty slot), or none.
        self.width = min(int(sizes.max()), tuning.TRADED_FROM)
        pairs = np.triu_indices(self.width + 1, 1)
        self.one, self.other = (np.append(each, self.width) for each in pairs)
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

    def make(self, enough: float, work: Work) -> None:
        """Trades until none is found, no work is left, or the time is `enough`."""
        looked_at = tuning.TRADE_PARTNERS * len(self.one) ** 2
        price = tuning.ONCE + tuning.LOOK * looked_at
        turn = stalled = 0
        while work.affords(price):
            if self.time() <= enough:
                return
            if self.make_one(turn):
                stalled = 0
                continue
            turn, stalled = turn + 1, stalled + 1
            if stalled >= tuning.TRADE_PATIENCE * self.columns:
                return

    def make_one(self, turn: int) -> bool:
        """The best trade of a column's dearest unit, each column's in turn; whether one gains."""
        column = turn % self.columns
        high = int(self.order[column, 0])
        a = high * self.M + turn % self.M if self.per_step else high
        others = self._partners(turn)
        mine, theirs = self._samples([a], turn), self._samples(others.tolist(), turn)
        dearer = self._differences(self.cost, mine, theirs)
        more = self._differences(self.tokens, mine, theirs)
        after = self._after(column, self.unit[others], dearer)
        after[(more > self.room[others, None, None]) | (-more > self.room[a])] = np.inf
        fewer = self._differences(self.there, mine, theirs)  # in a; no trade leaves a bin empty
        held = np.array([len(self.bins[b]) for b in others.tolist()], dtype=np.int64)
        after[(len(self.bins[a]) <= fewer) | (held[:, None, None] <= -fewer)] = np.inf
        best = int(after.argmin())
        if not after.ravel()[best] < self.levels[column, 0] * (1 + tuning.BETWEEN_EQUALS):
            return False
        p, one, other = (int(i) for i in np.unravel_index(best, after.shape))
        b = int(others[p])
        gives, takes = [self.one[one], self.other[one]], [self.one[other], self.other[other]]
        self._swap(a, b, mine[0, gives], theirs[p, takes])
        self.load[high] -= dearer[p, one, other]
        self.load[self.unit[b]] += dearer[p, one, other]
        self.room[a] += more[p, one, other]
        self.room[b] -= more[p, one, other]
        self._sort()
        return True

    def _partners(self, turn: int) -> IntArray:
        """Bins of the units furthest below those they wait for; in later turns, other ones."""
        slack = self.levels[self.column, 0] - self.load
        slack[self.order[:, 0]] = -1.0  # whom others wait for
        slack = slack[self.unit]
        found = np.argsort(-slack, kind="stable")[: np.count_nonzero(slack >= 0)]
        most = tuning.TRADE_PARTNERS
        return np.roll(found, -(turn // self.columns) * most)[:most]

    def _samples(self, bins: list[int], turn: int) -> IntArray:
        """Samples of each bin that are looked at, int64[bins, slots], other ones in each turn."""
        rows, width = [], self.width
        for b in bins:
            held: list[int] = self.bins[b]
            if len(held) > width:
                held = [held[(i * len(held) // width + turn) % len(held)] for i in range(width)]
            rows.append(held + [self.nobody] * (width + 1 - len(held)))
        return np.array(rows, dtype=np.int64)

    def _after(self, column: int, units: IntArray, dearer: FloatArray) -> FloatArray:
        """What this column costs after each trade; inf where another one would cost more.

        dearer: float64[partner, given, taken], by how much what is given is.
        """
        levels, same = self.levels[column], self.column[units] == column
        third = levels[2] if self.R > 2 else 0.0
        rest = np.where(units == self.order[column, 1], third, levels[1])
        after: FloatArray = levels[0] - dearer
        theirs = dearer + self.load[units, None, None]
        after[same] = np.maximum(after[same], theirs[same])
        most = np.where(same, np.inf, self.levels[self.column[units], 0])
        # Of trades that are as good, what takes most off, or levels the two best. Where several
        # units are the dearest, each has to become cheaper before the column does.
        after = np.maximum(after, rest[:, None, None]) + tuning.BETWEEN_EQUALS * after
        most = most[:, None, None]
        after[theirs == most] += tuning.BETWEEN_EQUALS * levels[0]
        after[theirs > most] = np.inf
        return after

    def _differences(
        self, of: FloatArray | IntArray, mine: IntArray, theirs: IntArray
    ) -> FloatArray:
        """What is given less what is taken, [partner, given, taken]."""
        one, other = of[mine], of[theirs]
        gives, takes = (each[:, self.one] + each[:, self.other] for each in (one, other))
        out: FloatArray = gives[:, :, None] - takes[:, None, :]
        return out

    def _swap(self, a: int, b: int, gives: IntArray, takes: IntArray) -> None:
        for source, to, samples in ((a, b, gives), (b, a, takes)):
            for i in samples[samples < self.nobody].tolist():
                self.bins[source].remove(i)
                self.bins[to].append(i)

    def parts(self) -> Parts:
        """Bins of like cost share a micro-step."""
        R, M, n = self.R, self.M, self.nobody
        place = np.arange(R * M) if self.per_step else places_of(self.load, R, M, per_step=False)
        return Parts.of_labels(np.arange(n), place[labels_of(self.bins, n)], M, R)
