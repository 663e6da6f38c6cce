"""Padded micro-batches of any number of samples, under a budget of padded tokens.

Invariant: each item is in exactly one run of neighbours; a run is padded to its longest item, so
its count times that one's tokens stay within `budget`, or it is a single item. There are R*M runs,
none empty unless there are fewer items. Items descend in cost and in tokens. The result never takes
longer than what the search begins with.

A padded micro-batch costs its count times its longest sample. So sorted runs waste least: whatever
shares a micro-batch with the longest sample left, the next longest may as well. Where ranks meet at
every micro-step, R runs make one, which lasts as long as its *level*, the most that a run of it
costs. The budget alone does not say how many micro-batches there should be: with more of them runs
are shorter and pad less. M grows from the fewest that fit while another micro-step saves more than
it costs to begin one.
Example, budget 16, R = 2, cost = tokens, items of 8 7 3 3 2 2: M = 1 pads 8 7 | 3 3 2 2 to 16 and
12, which takes 16; with M = 2 it is 8 | 7 and 3 3 | 2 2, which take 8 + 6.

*Levels that sum to the least*, by a dynamic program. A run that begins at an item of cost c holds
floor(level / c) samples, so the level says where the R runs of a micro-step end that begin at an
item. From the last place on: the best j micro-steps from here cost the level of one of them and the
best j - 1 from where it ends. It tries a coarse grid of levels, and then a fine one around those
that it found. The number of micro-steps comes with it, as it knows the least time for each; of
many, several have one level.
Example, R = 2, costs 8 7 3 3 2 2, M = 2: the level 8 ends at the first 3, 7 more would take in 3 3:
then 6 is enough for 3 3 | 2 2; 14 in all, where one micro-step needs 16: 8 7 | 3 3 2 2.

*Runs of like cost share a micro-step*, wherever in the falling order they begin, by a search. A run
that begins at an item of cost c fills floor(level / c) * c of its level: at each place another
level wastes least, so each run takes the level that it fills best. Which levels are best is
searched: those of the best runs so far, each somewhat higher or lower, many tries at once, in
rounds that stay closer and closer.
Example, R = 2, costs 8 3 3 2 2 2 2, levels 8 and 3: 8 fills the one, 3 and 3 the other, twice, and
2 2 2 2 the one again: 8 + 3. As neighbours 8 | 3 3 and 2 2 | 2 2 take 8 + 4.

Where ranks meet once a step runs need not be alike: their ends move to where the total is least,
or both runs beside them waste least, and runs are dealt to ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollout_planner import tuning
from rollout_planner.cost import Quadratic
from rollout_planner.order import running_sums
from rollout_planner.split.parts import Batch, Parts, time_of
from rollout_planner.types import CostModel, FloatArray, IntArray, PlanConfig


class Items:
    """What micro-batches are made of: samples, or groups that stay together.

    longest: falling, what the longest sample of each costs. most: samples of a run that begins
    there. size: samples of each; None: one. x: float64[n + 1], longest, but above 0. held:
    int64[n + 1], samples before each item. The last of each stands for the end. are_samples:
    whether each item is a single one.
    """

    def __init__(self, longest: FloatArray, most: IntArray, size: IntArray | None = None) -> None:
        positive = longest + (tuning.ROUNDING * float(longest[0]) or 1.0)
        self.x, self.most = np.append(positive, positive[-1]), np.append(most, 1.0)
        self.held = np.arange(len(longest) + 1) if size is None else running_sums(size)
        self.are_samples = int(self.held[-1]) == len(longest)

    def __len__(self) -> int:
        return len(self.held) - 1

    @property
    def work(self) -> float:
        """What all cost if each is padded by itself."""
        return float((np.diff(self.held) * self.x[:-1]).sum())

    def after(self, at: IntArray, level: FloatArray) -> IntArray:
        """Where runs end that begin at these items, and may cost so much or hold one item."""
        room = np.minimum(
            np.floor(level * (1 + tuning.ROUNDING) / self.x.take(at)), self.most.take(at)
        )
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
        around = max(table // len(best.costs()), tuning.KEPT)
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


def begin_cost(x: FloatArray, s: IntArray, budget: int, cost: CostModel | None = None) -> float:
    """What it costs to begin a micro-step; where the cost does not say it a share of a full one."""
    if isinstance(cost, Quadratic) and cost.d:
        return cost.d
    return tuning.BEGIN_MICRO_STEP * budget * float(x.sum()) / max(float(s.sum()), 1.0)


def begin_of(batch: Batch, config: PlanConfig) -> float:
    """The same of a batch's micro-steps; 0 where so many samples a micro-batch fix their number."""
    budget = config.micro_batch_tokens
    return 0.0 if budget is None else begin_cost(batch.x, batch.s, budget, config.cost)


def price_of(batch: Batch, parts: Parts, config: PlanConfig) -> float:
    """What these micro-batches take, with what it costs to begin each micro-step."""
    return time_of(batch, parts, config) + begin_of(batch, config) * parts.num_micro_batches


def padded_time(x: FloatArray, s: IntArray, config: PlanConfig) -> float:
    """What a good split takes where ranks meet at every micro-step, with what it costs to begin.

    Without following runs: a micro-step costs a rank its share of what is left, padded, or the
    largest item left.
    """
    R, budget, allowed = config.dp_size, config.micro_batch_tokens or 1, config.micro_batches
    most, begin = most_in_run(s, budget), begin_cost(x, s, budget, config.cost)
    fewest = allowed(-(-max(fewest_runs(s, budget), 1) // R))
    share = float(x.sum()) / R / fewest
    if not share:
        return begin * fewest
    x = np.maximum(x, tuning.ROUNDING * share)
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


def padded_runs(items: Items, counts: Counts, *, per_step: bool) -> IntArray | None:
    """Where the best runs begin, and the end; None if no way has room for all items.

    per_step: whether ranks meet once a step, so that what counts is the most loaded one.
    """
    n, runs = len(items), counts.R * counts.fewest
    if n <= runs:
        return np.arange(n + 1)
    known, most = list[IntArray](), int(items.most[0])
    if items.are_samples:
        known.append(np.arange(runs + 1) * n // runs)
        if runs * most >= n:  # as full as can be, and what lacks is lacking beside the longest
            lacks = np.clip(runs * most - n - np.arange(runs) * (most - 1), 0, most - 1)
            known.append(running_sums(most - lacks))
        if runs * most == n and counts.fewest == counts.last:
            return known[-1]
    known = [each for each in known if items.are_legal(each)]
    known += level_runs(items, counts)
    if not known:
        return None
    pool = _Pool(items, counts, per_step)
    for starts in known:
        pool.add(starts)
    for noise in tuning.NOISE[: 1 if per_step or not items.are_samples else None]:
        pool.search(noise)  # where ranks meet once a step, and of groups, more hardly helps
    if per_step:
        for starts in {len(each.starts): each.starts for each in reversed(pool.found)}.values():
            pool.add(moved(items, starts, items.work / counts.R))
    return pool.found[0].starts


class _Found(NamedTuple):
    """Runs, what they take, and the level of each stage of M micro-steps."""

    price: float
    M: int
    levels: FloatArray
    starts: IntArray


class _Pool:
    """The best runs so far, by rising price, and tries around them."""

    def __init__(self, items: Items, counts: Counts, per_step: bool) -> None:
        self.items, self.counts, self.per_step = items, counts, per_step
        self.found: list[_Found] = []

    def add(self, starts: IntArray) -> None:
        """Runs that begin there."""
        cost, M = self.items.costs(starts), (len(starts) - 1) // self.counts.R
        price = float(self.prices(cost[:, None], np.array([M]))[0])
        levels = level_of(cost, self.counts.R)[:: self.counts.together]
        self.found.append(_Found(price, M, levels, starts))
        self.found.sort(key=lambda each: each.price)

    def prices(self, cost: FloatArray, M: IntArray) -> FloatArray:
        """What tries take, and what it costs to begin M micro-steps; cost: float64[runs, tries]."""
        R, time = self.counts.R, np.zeros(cost.shape[1])
        if self.per_step:  # LPT, a round of ranks at a time
            falling, load = -np.sort(-cost, axis=0), np.zeros((R, cost.shape[1]))
            for first in range(0, len(cost), R):
                load.sort(axis=0)
                load[: len(cost) - first] += falling[first : first + R]
            time = load.max(axis=0)
        else:
            time = level_of(cost, R).sum(axis=0)
        prices: FloatArray = time + self.counts.begin * M
        return prices

    def search(self, noise: FloatArray) -> None:
        """Levels somewhat above or below those of the best, and at first of all alike."""
        items, R, n, together = self.items, self.counts.R, len(self.items), self.counts.together
        best, depth = self.found[0], -(-self.counts.last // together)
        even = np.full(len(best.levels), items.work / (R * best.M))
        parents = (*self.found[: tuning.KEPT], best._replace(levels=even))
        noise = np.exp(noise[:: max(R * best.M // tuning.ALL_TRIED, 1)])
        tries, copies = np.ones((depth, len(noise))), np.zeros((depth, len(noise)), dtype=np.int64)
        for i, (_, M, levels, _) in enumerate(parents):
            own, last = slice(i, None, len(parents)), len(levels) - 1
            tries[: last + 1, own] = (levels * noise[own, : last + 1]).T
            copies[:last, own], copies[last, own] = R * together, R * (M - together * last)
        np.maximum(tries[0], items.x[0], out=tries[0])
        begins = fill(items, tries, copies, n)
        ended = np.flatnonzero(begins[-1] == n)
        runs = copies[:, ended].sum(axis=0)
        prices = self.prices(items.costs(begins[:, ended]), runs // R)
        _, first = np.unique(
            np.rint(prices / (self.found[0].price * tuning.BETWEEN_EQUALS)), return_index=True
        )
        for i in first[: tuning.KEPT].tolist():
            self.add(with_all(begins[:, ended[i]], int(runs[i]), n))


def level_of(cost: FloatArray, R: int) -> FloatArray:
    """Falling costs of the dearest run of each micro-step, float64[M, ...]; cost: [runs, ...]."""
    levels: FloatArray = -np.sort(-cost, axis=0)[::R]
    return levels


def fill(items: Items, levels: FloatArray, copies: IntArray, n: int) -> IntArray:
    """Where runs begin, and the end, int64[runs + 1, tries]; some are empty.

    levels: float64[M, tries]; copies: int64[M, tries], runs of each level. A try whose runs do not
    hold all items ends before them.
    """
    G, held, most, per = levels.shape[1], items.held, items.most, (1 + tuning.ROUNDING) / items.x
    together = max(int(copies.sum(axis=0).max()) // tuning.FILL_STEPS, 1)
    levels, left = np.where(copies > 0, levels, -1.0), copies.copy()
    each = 1 / np.abs(levels)
    flat_levels, flat_left, column = levels.ravel(), left.ravel(), np.arange(G)
    at, starts = np.zeros(G, dtype=np.int64), [np.zeros(G, dtype=np.int64)]
    for step in range(steps := int((-(-copies // together)).sum(axis=0).max())):
        if step == steps - 1 and together == 1:
            np.copyto(levels, np.inf, where=levels > 0)  # the last run takes what is left
        length = np.minimum(np.floor(levels * per.take(at)), most.take(at))
        if not items.are_samples:
            ends = held.searchsorted(held.take(at) + np.maximum(length, 0.0), "right") - 1
            length = np.where(levels > 0, held.take(ends) - held.take(at), -1.0)
        chosen = (length * each).argmax(axis=0) * G + column
        level, runs = flat_levels.take(chosen), flat_left.take(chosen)
        for run in range(together):
            if run or not items.are_samples:
                to = items.after(at, level)
            else:
                to = at + np.maximum(length.take(chosen), 1.0).astype(np.int64)
            at = np.minimum(np.where(runs > run, to, at), n)
            starts.append(at)
        flat_left[chosen] = runs - together
        flat_levels[chosen[runs <= together]] = -1.0  # never the best
        if (at == n).all():
            break
    return np.array(starts)


def moved(items: Items, starts: IntArray, largest: float) -> IntArray:
    """Each run's end moved between its neighbours' to where both waste least, in turns.

    largest: what a run may cost, unless it costs more already.
    """
    starts, x, held = starts.copy(), items.x, items.held
    for sweep in range(tuning.ROUNDS):
        turn = np.arange(1 + sweep % 2, len(starts) - 1, 2)
        first, at, last = starts[turn - 1, None], starts[turn, None], starts[turn + 1, None]
        spread = first + ((last - first) * tuning.END_SPREAD).astype(np.int64)
        to = np.concatenate((at, spread, at + tuning.END_CLOSE), axis=1)
        to = np.clip(to, first + 1, last - 1)
        one, other = held[to] - held[first], held[last] - held[to]
        fits = (one <= items.most[first]) | (to - first == 1)
        fits &= (other <= items.most[to]) | (last - to == 1)
        dear = np.maximum(one * x[first], other * x[to])
        fits &= dear <= np.maximum(largest, dear[:, :1])
        best = np.where(fits, one * x[first] + other * x[to], np.inf).argmin(axis=1)
        starts[turn] = to[np.arange(len(turn)), best]
    return starts
