"""The outlier lane: the heaviest samples wait for each other and leave together.

Invariant: a candidate keeps exactly `take` items and everything that is forced.

A sample that costs more than a rank's share of the step makes every other rank wait, whatever the
partition. Alone it wastes most of a step; together with the heaviest others the step is so much
longer that nobody waits for it. So while the window has such a sample, the heaviest are held back;
as soon as they can leave together without waiting, or one of them is due, they go. (WLB-LLM delays
outlier documents in the same spirit.)

Outliers that have others like them in the window leave soon, so as few are held as help. Those that
stand alone need company, which takes time to gather: an eighth of a dispatch batch is held as long
as there is one of them. How much a step's loss tokens may stray for it is for `loss_bound`.

What is held back is not free: when it is due it may have to go without company. `debt` charges a
candidate for that, by how much less the sample costs that is a column further down, but only in
steps in which the lane has to open anyway.

Example: R = 2, take 4, window 20 2 2 2 2 2: the 20 alone with 2 2 2 waits 20 / 13 - 1 = 54 %.
Held until two more like it have come, 20 20 20 2 waits 40 / 31 - 1 = 29 %; with a fourth, 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rollout_planner import tuning
from rollout_planner.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Pool:
    """What a selection chooses from, in arrival order: samples, or groups as one item each.

    cost: float64[n]. order: int64[n], items by falling cost. age: float64[n], skips suffered as
    a share of the bound. forced: bool[n], has to go now. neighbours: how many items of a
    micro-step should be alike. columns: whether waiting comes from differences inside
    micro-steps rather than from single outliers.
    band: share of the window by which lengths may lead or lag. share: cost above which an item
    rules a rank on its own. per_step: whether ranks wait once a step.
    """

    cost: FloatArray
    order: IntArray
    age: FloatArray
    forced: BoolArray
    neighbours: int
    columns: bool
    band: float
    share: float
    per_step: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """The heavy end of a window. `order`: items by falling cost; `watched`: those in the lane."""

    order: IntArray
    forced: BoolArray
    neighbours: int
    outliers: int
    has_company: bool
    held_share: int
    watched: IntArray
    charge: FloatArray

    @classmethod
    def of(cls, pool: Pool) -> "Lane":
        """Find the heavy end; `charge` is what holding each watched item longer may cost."""
        order = pool.order
        cost = pool.cost[order[: (tuning.WATCHED_COLUMNS + 1) * pool.neighbours]]
        # Where waiting comes from columns no candidate of the lane is tried.
        outliers = 0 if pool.columns else int(np.count_nonzero(pool.cost > pool.share))
        companion = cost[min(pool.neighbours // tuning.COMPANY_RANKS, len(cost) - 1)]
        count = tuning.WATCHED_COLUMNS * pool.neighbours
        opens = (outliers > 0 or pool.columns) and bool(pool.forced[order[:count]].any())
        if not opens or count >= len(order):
            count = 0
        charge = np.zeros(count)
        if count:
            company = cost[np.minimum(np.arange(count) + pool.neighbours, len(cost) - 1)]
            charge = tuning.DEBT_WEIGHT * pool.age[order[:count]] * (cost[:count] - company)
            charge /= max(pool.share, 1e-300)
        return cls(
            order=order,
            forced=pool.forced,
            neighbours=pool.neighbours,
            outliers=outliers,
            has_company=bool(companion >= tuning.COMPANY_COST * cost[0]),
            held_share=tuning.HELD_PER_STEP if pool.per_step else tuning.HELD,
            watched=order[:count],
            charge=charge,
        )

    def debt(self, keep: BoolArray) -> float:
        """What the worst of the watched items that stay behind may cost later, as excess."""
        if not len(self.watched):
            return 0.0
        return float(np.maximum.reduce(self.charge[~keep[self.watched]], initial=0.0))

    def candidates(self, take: int) -> Iterator[BoolArray]:
        """The heaviest together; then some of the heaviest held, and the next ones together."""
        company = [min(k * self.neighbours, take) for k in tuning.COMPANY]
        for k in company:
            yield keep_oldest(self.forced, take, first=self.order[:k])
        for h in self._held_counts(take):
            held = self.order[:h]
            yield keep_oldest(self.forced, take, last=held)
            if self.forced.any():
                for k in company:
                    yield keep_oldest(self.forced, take, first=self.order[h : h + k], last=held)

    def _held_counts(self, take: int) -> list[int]:
        """How many to hold, as tried in turn."""
        spare = len(self.order) - take
        if not self.outliers:
            return _quarters(min(take // tuning.HELD_FOR_SHAPE, spare))[1::-1]
        if not self.has_company:
            return _quarters(min(take // tuning.HELD_ALONE, spare))
        most = max(min(take // self.held_share, spare), 1)
        counts, held = [], self.outliers
        while held < most:
            counts.append(held)
            held = int(held * tuning.HELD_GROWTH) + 1
        return [*counts, most]


def _quarters(most: int) -> list[int]:
    """`most`, a quarter of it, and so on, down to 1."""
    most = max(most, 1)
    return [most >> i for i in range(0, most.bit_length(), 2)]


def keep_oldest(
    forced: BoolArray, take: int, first: IntArray | None = None, last: IntArray | None = None
) -> BoolArray:
    """Mask of `take` items in arrival order: `forced`, then `first`, then the oldest.

    Items of `last` are taken only if nothing else is left.
    """
    keep = forced.copy()
    if first is not None:
        keep[first] = True
    others = ~keep
    if last is not None:
        others[last] = False
    left, oldest = take - int(np.count_nonzero(keep)), others.nonzero()[0]
    if not 0 <= left <= len(oldest):
        return _keep_in_turn(forced, take, first, last)
    keep[oldest[:left]] = True
    return keep


def _keep_in_turn(
    forced: BoolArray, take: int, first: IntArray | None, last: IntArray | None
) -> BoolArray:
    """The same where `first` are too many, or some of `last` have to be taken."""
    turn = np.full(len(forced), 2, dtype=np.int8)
    if last is not None:
        turn[last] = 3
    if first is not None:
        turn[first] = 1
    turn[forced] = 0
    keep = np.zeros(len(forced), dtype=bool)
    keep[turn.argsort(kind="stable")[:take]] = True
    return keep
