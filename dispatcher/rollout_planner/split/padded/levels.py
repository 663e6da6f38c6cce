"""Levels of padded micro-steps, what the dearest run of each may cost, that sum to the least.

Invariant: R*M runs of neighbours, each of one item at least and of no more samples than a run may
hold that begins there. Items descend in the cost of their longest sample.

A run that begins at an item of cost c holds floor(level / c) samples, so the level says where the R
runs of a micro-step end that begin at an item. Dynamic program over these places, from the last:
the best j micro-steps from here cost the level of one of them and the best j - 1 from where it
ends. It tries a coarse grid of levels, and then a fine one around those that it found. The number
of micro-steps comes with it, as it knows the least time for each; of many, several have one level.

Example, R = 2, costs 8 7 3 3 2 2, M = 2: the level 8 ends at the first 3, 7 more would take in 3 3:
then 6 is enough for 3 3 | 2 2; 14 in all, where one micro-step needs 16: 8 7 | 3 3 2 2.

Padded micro-batches of any number of samples, under a budget of padded tokens.

Invariant: each item is in exactly one run of neighbours; a run is padded to its longest item, so
its count times that one's tokens stay within `budget`, or it is a single item. There are R*M runs,
none empty unless there are fewer items. Items descend in cost and in tokens.

A padded micro-batch costs its count times its longest sample. So sorted runs waste least: whatever
shares a micro-batch with the longest sample left, the next longest may as well. Where ranks
meet at every micro-step, R runs make one, which lasts as long as its *level*, the most that a run
of it costs: levels.py finds those that sum to the least, and fill.py searches around them.
Where ranks meet once a step, runs need not be alike: their ends then move to where the total is
least, and runs are dealt to ranks.

The budget alone does not say how many micro-batches there should be: with more of them runs are
shorter and pad less. M grows from the fewest that fit while another micro-step saves more than it
costs to begin one.

Example, budget 16, R = 2, cost = tokens, items of 8 7 3 3 2 2: M = 1 pads 8 7 | 3 3 2 2 to 16 and
12, which takes 16; with M = 2 it is 8 | 7 and 3 3 | 2 2, which take 8 + 6.
"""

from dataclasses import dataclass

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import running_sums
from rollout_planner.split.assign import spread_columns
from rollout_planner.split.partition import bins_onto_ranks
from rollout_planner.types import FloatArray, IntArray, PlanConfig, cut


@dataclass(frozen=True, slots=True)
class Items:
    """What micro-batches are made of: samples, or groups that stay together.

    x: float64[n + 1], falling, what the longest sample of each costs, above 0. most:
    float64[n + 1], samples of a run that begins there. held: int64[n + 1], samples before each
    item. The last of each stands for the end. are_samples: whether each item is a single one.
    """

    x: FloatArray
    most: FloatArray
    held: IntArray
    are_samples: bool

    @classmethod
    def of(cls, longest: FloatArray, most: IntArray, size: IntArray | None = None) -> "Items":
        """most: samples of a run that begins there. size: samples of each item; None: one."""
        positive = longest + (1e-12 * float(longest[0]) or 1.0)
        held = np.arange(len(longest) + 1) if size is None else running_sums(size)
        single = int(held[-1]) == len(longest)
        return cls(np.append(positive, positive[-1]), np.append(most, 1.0), held, single)

    def __len__(self) -> int:
        return len(self.held) - 1

    @property
    def work(self) -> float:
        """What all cost if each is padded by itself."""
        return float((np.diff(self.held) * self.x[:-1]).sum())

    def after(self, at: IntArray, level: FloatArray) -> IntArray:
        """Where runs end that begin at these items, and may cost so much or hold one item."""
        room = np.minimum(np.floor(level * (1 + 1e-12) / self.x.take(at)), self.most.take(at))
        if self.are_samples:
            ends: IntArray = at + np.maximum(room, 1.0).astype(np.int64)
        else:
            ends = np.maximum(self.held.searchsorted(self.held[at] + room, "right") - 1, at + 1)
        return np.minimum(ends, len(self))

    def costs(self, starts: IntArray) -> FloatArray:
        """What runs cost that begin at `starts[:-1]` and end where the next one begins, of many."""
        costs: FloatArray = np.diff(self.held[starts], axis=0) * self.x[starts[:-1]]
        return costs

    def are_legal(self, starts: IntArray) -> bool:
        """Whether none of these runs holds more than it may, unless it is a single item."""
        samples, items = np.diff(self.held[starts]), np.diff(starts)
        return bool(((samples <= self.most[starts[:-1]]) | (items <= 1)).all())


@dataclass(frozen=True, slots=True)
class Counts:
    """Micro-steps that there may be, of R ranks, and what it costs to begin one.

    fewest, last: their least and largest number, of which it is a `multiple`.
    """

    R: int
    fewest: int
    last: int
    multiple: int = 1
    begin: float = 0.0

    @property
    def together(self) -> int:
        """Micro-steps of one level, so that these are few."""
        return -(-self.last // (tuning.STAGES * self.multiple)) * self.multiple


def level_runs(items: Items, counts: Counts) -> list[IntArray]:
    """Where runs begin, and the end, int64[R*M + 1], for the best M and its neighbours.

    None if no level holds all items.
    """
    own, table = -np.sort(-items.x[:-1] * np.diff(items.held)), tuning.LEVEL_TABLE // len(items)
    top, share = float((items.most * items.x).max()), items.work / (counts.R * counts.last)
    low = max(float(own[: counts.R * counts.last][-1]), share / 2) / 2
    levels = low * np.geomspace(1, max(top / low, 1), int(np.clip(table, *tuning.LEVELS)))
    best = _Program(items, np.append(levels, own[0]), counts)
    if best.price < np.inf:
        around = max(table // len(best.costs()), 3)
        levels = np.outer(best.costs(), tuning.FINE_LEVELS[:around])
        fine = _Program(items, np.unique(np.append(levels, top)), counts)
        best = min(best, fine, key=lambda steps: steps.price)
    found = []
    for stages in range(max(best.stages - 1, 1), min(best.stages + 2, len(best.best))):
        if best.best[stages][0] < np.inf:
            starts = best.starts(stages)
            M = max(-(-(len(starts) - 1) // counts.R), counts.fewest)
            M = -(-M // counts.multiple) * counts.multiple
            if counts.last >= M:
                found.append(with_all(starts, counts.R * M, len(items)))
    return found


def with_all(begins: IntArray, runs: int, n: int) -> IntArray:
    """So many runs, each with an item if there are as many, of those that are not empty."""
    starts = np.unique(begins)[: runs + 1]
    starts = np.append(starts, np.full(runs + 1 - len(starts), n))
    held: IntArray = np.minimum(starts, np.maximum(n - np.arange(runs, -1, -1), 0))
    return held


class _Program:
    """The dynamic program over places where a micro-step, or several of one level, may begin."""

    def __init__(self, items: Items, levels: FloatArray, counts: Counts) -> None:
        self.items, self.levels, self.counts = items, levels, counts
        n, row = len(items), (np.arange(len(levels)) * (len(items) + 1))[:, None]
        at = np.arange(n)
        ends, cost = np.full((len(levels), n + 1), n), np.zeros((len(levels), n + 1))
        ends[:, :n] = items.after(at[None], levels[:, None])
        cost[:, :n] = (items.held[ends[:, :n]] - items.held[:-1]) * items.x[:-1]
        flat, worst = _repeated((ends + row).ravel(), cost.ravel(), counts.R * counts.together)
        self.ends, self.cost = flat.reshape(ends.shape) - row, worst.reshape(ends.shape)
        nothing = np.full(n + 1, np.inf)
        nothing[-1] = 0.0
        self.best = [nothing]  # time of j stages from each place to the last
        self.price, self.stages = np.inf, 1
        self._count()

    def _count(self) -> None:
        """How many micro-steps take the least time and what it costs to begin them."""
        counts = self.counts
        for j in range(1, -(-counts.last // counts.together) + 1):
            self.best.append((self.best[-1].take(self.ends) + self.cost).min(axis=0))
            M = min(j * counts.together, counts.last)
            if counts.fewest <= M and M % counts.multiple == 0:
                price = float(self.best[j][0]) * counts.together + counts.begin * M
                if price < self.price:
                    self.price, self.stages = price, j
                elif j > self.stages + counts.multiple:
                    break

    def walk(self, stages: int) -> list[tuple[int, int, int]]:
        """Place, place of the end, and number of the level of each stage."""
        at, found = 0, []
        for j in range(stages, 0, -1):
            level = int((self.best[j - 1][self.ends[:, at]] + self.cost[:, at]).argmin())
            found.append((at, int(self.ends[level, at]), level))
            at = found[-1][1]
        return found

    def costs(self) -> FloatArray:
        """What a micro-step of each stage costs."""
        return np.array([self.cost[level, at] for at, _, level in self.walk(self.stages)])

    def starts(self, stages: int) -> IntArray:
        """Where the runs of these micro-steps begin, and the end."""
        at, end, level = np.array(self.walk(stages)).T
        found = [at]
        while (at < end).any():
            at = np.minimum(self.items.after(at, self.levels[level]), end)
            found.append(at)
        return np.unique(found)


def _repeated(ends: IntArray, cost: FloatArray, times: int) -> tuple[IntArray, FloatArray]:
    """Follow `ends` so many times, and the largest cost on the way, by squaring."""
    done: tuple[IntArray, FloatArray] | None = None
    while True:
        if times & 1:
            one = done or (np.arange(len(ends)), np.zeros(len(ends)))
            done = ends.take(one[0]), np.maximum(one[1], cost.take(one[0]))
        times >>= 1
        if not times and done is not None:
            return done
        cost = np.maximum(cost, cost.take(ends))
        ends = ends.take(ends)


def most_in_run(s: IntArray, budget: int) -> IntArray:
    """Items that a run may hold which begins with an item of `s` tokens, one at least."""
    most: IntArray = np.maximum(budget // np.maximum(s, 1), 1)
    return most


def fewest_runs(s: IntArray, budget: int) -> int:
    """Micro-batches that hold items of falling tokens at least: each is as full as can be."""
    most = most_in_run(s, budget).tolist()
    at = count = 0
    while at < len(most):
        at += most[at]
        count += 1
    return count


def begin_cost(x: FloatArray, s: IntArray, budget: int, known: float | None = None) -> float:
    """What it costs to begin a micro-step; where it is not known a share of a full one."""
    if known is not None:
        return known
    return tuning.BEGIN_MICRO_STEP * budget * float(x.sum()) / max(float(s.sum()), 1.0)


def cut_padded(ranks: list[IntArray], s: IntArray, budget: int) -> list[list[IntArray]]:
    """Each rank's items, in their order, into runs as full as can be.

    What trainers do that pad what they were dealt; of falling tokens these are the fewest runs.
    """
    return [cut(items, _sizes(s[items].tolist(), budget)) for items in ranks]


def _sizes(s: list[int], budget: int) -> list[int]:
    sizes, count, longest = [], 0, 0
    for tokens in s:
        count, longest = count + 1, max(longest, tokens)
        if count > 1 and count * longest > budget:
            sizes.append(count - 1)
            count, longest = 1, tokens
    return [*sizes, count]


def padded_time(x: FloatArray, s: IntArray, config: PlanConfig) -> float:
    """What a good split takes where ranks meet at every micro-step, with what it costs to begin.

    Without following runs: a micro-step costs a rank its share of what is left, padded, or the
    largest item left.
    """
    R, budget, allowed = config.dp_size, config.micro_batch_tokens or 1, config.micro_batches
    most, begin = most_in_run(s, budget), begin_cost(x, s, budget, config.begin)
    fewest = allowed(-(-max(fewest_runs(s, budget), 1) // R))
    share = float(x.sum()) / R / fewest
    if not share:
        return begin * fewest
    x = np.maximum(x, tuning.LEAST_SHARE * share)
    levels = share * tuning.ESTIMATE_SHARES
    length = np.clip(np.floor(levels[:, None] / x), 1, most)
    runs = np.maximum((1 / length).sum(axis=1), R * fewest)
    held = levels * runs
    best = int(np.argmin(held + begin * runs))
    left, time = float(held[best]) / R, 0.0
    M = allowed(round(float(runs[best]) / R))
    for j in range(M):
        largest = float(x[j * R]) if j * R < len(x) else 0.0
        if largest * (M - j) <= left:
            break
        left = max(left - largest, 0.0)
        time += largest
    return time + left + begin * M


def places_of(load: FloatArray, R: int, M: int, per_step: bool, stages: int = 1) -> IntArray:
    """Give each of R*M micro-batches of this cost its rank and micro-step, rank * M + micro-step.

    Ranks of equal sums, or like with like.
    """
    if per_step:
        return bins_onto_ranks(load, R, M, stages)
    place, by_cost = np.empty(R * M, dtype=np.int64), np.argsort(-load, kind="stable")
    rank_of = spread_columns(load[by_cost].reshape(M, R))
    place[by_cost] = (rank_of * M + np.arange(M)[:, None]).ravel()
    return place
