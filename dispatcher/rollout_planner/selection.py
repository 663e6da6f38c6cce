"""Which samples of the window a step takes: what is due, whole groups where asked, then the best.

Invariant: exactly `take` positions (with groups, the largest total that whole groups reach), and
the same ones for the same window and config. What is due is among them as far as it fits, so nobody
is skipped beyond its bound, now or in any later step that takes as many.

Candidates are tried from the least to the most selective, and the first that seems to wait no more
than `tuning.LEVEL` ends the search, so that ages and lengths are disturbed only as far as it pays;
where its split turns out to wait longer the planner asks for the others. They are the oldest; the
outlier lane; the column DP. Where micro-steps have a fixed size there is the DP without the lane.
Once something is due, the DP is tried with the heaviest leaving together as well.

*The outlier lane.* A sample that costs more than a rank's share of the step makes every other rank
wait, whatever the partition. Together with the heaviest others it makes the step so much longer
that nobody waits for it. So some of the heaviest are held back, or they leave together. (WLB-LLM
delays outlier documents in the same spirit.) To hold many is tried before few; where no sample
rules a rank it is the shape of a packing that waits, which takes few to mend, and few come first.
What is held back may have to go without company when it is due: `debt` charges a candidate for
that, by how much less the item costs that is a column further down, but only in steps in which one
of the heaviest is due anyway.
Example: R = 2, take 4, window 20 2 2 2 2 2: the 20 alone with 2 2 2 waits 20 / 13 - 1 = 54 %. Held
until two more like it have come, 20 20 20 2 waits 40 / 31 - 1 = 29 %; with a fourth, 0.

*The column DP.* Sorted by falling cost, a column of G neighbours costs G * largest - sum in
waiting. The program walks the columns from the heavy end; its state is how many items were skipped
so far. Skipping an item costs its penalty, which grows with age. Skips stay within a band around
their share, and the square of how far they lead or lag it has a price, so that the lengths that
leave follow the lengths that arrived. Light columns waste little: they are taken in runs, the
longer the lighter.
Example: costs 9 5 5 1 1, take 4, G = 2: [9 5][5 1] wastes 8, skipping the 9 gives [5 5][1 1] and
wastes nothing.

*The loss tokens of a step* (`LossBound`). Under `token-mean` a token of a step with twice the loss
tokens counts half as much. A selection that lets the longest samples leave together halves their
weight; one that keeps each step's loss tokens within a share v of the mean gives every sample a
weight between 1/(1+v) and 1/(1-v). What is due goes, whatever its loss tokens; everything else is
exchanged, as few samples as can be, until the step is within the bound or nothing that brings it
nearer is left.
Example, mean 3 and v = 1/3: a step of 9 9 1 1 has 20 loss tokens where 8 to 16 may be. One of the
9s stays behind, and a 2 leaves instead: 9 2 1 1.

*Groups that leave together.* A group is taken whole or not at all; the total is the largest that
whole groups can reach within `take`, given those that are due.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rollout_planner import tuning
from rollout_planner.errors import PlanError
from rollout_planner.objective import estimate, rank_bound
from rollout_planner.order import group_index, group_max, running_sums
from rollout_planner.split.groups import config_of_items, cost_of_groups
from rollout_planner.types import (
    BoolArray,
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    PlanConfig,
    Sync,
    Window,
)

#: Mask of the items to keep -> waiting of a good split of them, over the work of a mean batch.
Judge = Callable[[BoolArray], float]


@dataclass(frozen=True, slots=True)
class Selection:
    """Mask of the items to keep; their estimated waiting, now and later; and later only."""

    keep: BoolArray
    total: float = 0.0
    later: float = 0.0


@dataclass(frozen=True, slots=True)
class Pool:
    """What a selection chooses from, in arrival order: samples, or groups as one item each.

    cost: float64[n]. order: int64[n], items by falling cost. age: float64[n], skips suffered as a
    share of the bound. forced: bool[n], has to go now. neighbours: how many items of a micro-step
    should be alike. columns: whether waiting comes from differences inside micro-steps rather than
    from single outliers. share: what a rank has of a step.
    """

    cost: FloatArray
    order: IntArray
    age: FloatArray
    forced: BoolArray
    neighbours: int
    columns: bool
    share: float


@dataclass(frozen=True, slots=True)
class LossBound:
    """above: float64[n], loss tokens of each item beyond those of as many mean samples. most: what
    the items of a step may sum up to, above or below 0.
    """

    above: FloatArray
    most: float

    @classmethod
    def of(
        cls, window: Window, config: PlanConfig, take: float, index: IntArray | None = None
    ) -> "LossBound | None":
        """For a step of `take` samples; None where there is no bound.

        index: group of each sample, where items are groups.
        """
        tokens, share = window.loss_tokens, config.max_step_variation
        if tokens is None or share is None:
            return None
        usual = window.usual_loss_tokens
        mean, deviation = usual or (float(tokens.mean()), float(tokens.std()))
        most = max(share * mean * take, deviation * float(np.sqrt(take)))
        above = tokens.astype(np.float64) - mean
        held = above if index is None else np.bincount(index, weights=above).astype(np.float64)
        return cls(held, most)

    def due(self, left: IntArray, forced: BoolArray, take: int) -> BoolArray:
        """What goes now beside what is forced, so that no later step has to carry too much.

        For every j, what has at most j skips left leaves within j + 1 steps, which carry `most`
        each: what is beyond j * most goes now, the most urgent first.
        """
        order = np.argsort(left, kind="stable")
        sums, heavy = self.above[order].cumsum(), self.above[order] > 0
        later = np.maximum(left[order], 0) * self.most
        need = float(np.maximum.reduce(sums - later, initial=0.0))
        if need <= 0:
            return forced
        going = np.where(heavy, self.above[order], 0.0).cumsum() - self.above[order]
        due = forced.copy()
        due[order[heavy & (going < min(need, self.most))]] = True
        return due if np.count_nonzero(due) <= take else forced

    def within(self, keep: BoolArray, forced: BoolArray) -> BoolArray:
        """The same number of items, within the bound, or as near to it as exchanging brings them.

        Heavy items change places with light ones: with those that wait longest, or that came last
        if they are to stay. The least heavy are the first to be exchanged, as the others are
        company for each other; where all of them are not enough the heaviest are.
        """
        total = float(self.above[keep].sum())
        over = abs(total)
        if over <= self.most:
            return keep
        free, others = np.flatnonzero(keep & ~forced), np.flatnonzero(~keep)
        heavy, light = (free, others) if total > 0 else (others, free[::-1])
        heavy, light = heavy[self.above[heavy] > 0], light[self.above[light] <= 0]
        heavy = heavy[np.argsort(self.above[heavy], kind="stable")]
        found, n = keep.copy(), min(len(heavy), len(light))
        best, least = heavy[:0], over
        for order in (heavy[:n], heavy[::-1][:n]):
            left = np.abs(over - (self.above[order] - self.above[light[:n]]).cumsum())
            reached = np.flatnonzero(left <= self.most)
            at = int(reached[0]) if len(reached) else int(left.argmin()) if n else 0
            if n and left[at] < least:
                best, least = order[: at + 1], float(left[at])
            if least <= self.most:
                break
        found[best], found[light[: len(best)]] = total < 0, total > 0
        return found


def choose(
    window: Window,
    cost: FloatArray,
    config: PlanConfig,
    take: int,
    *,
    by_cost: IntArray,
    ahead: bool,
) -> Iterator[Selection]:
    """What this step may take, as masks, the most promising first; the oldest are among them.

    by_cost: positions by falling tokens. Nothing but the oldest unless `ahead`.
    """
    if take >= len(window):
        yield Selection(np.ones(len(window), dtype=bool))
        return
    items = _Items(window, cost, config, take)
    if items.size.min() > take:
        raise PlanError(
            f"the smallest group has {items.size.min()} samples and the step takes {take}; "
            "raise --global-batch-size to the size of a group at least"
        )
    forced = items.due(take)

    def realise(first: BoolArray) -> BoolArray:
        return items.filled(first, forced, take)

    oldest = realise(np.ones(len(forced), dtype=bool))
    if not ahead:
        yield Selection(oldest[items.index])
        return
    bound = LossBound.of(window, config, items.samples, items.index)
    count = int(np.count_nonzero(oldest))
    if bound is not None:
        forced = bound.due(items.left, forced, count)
    together = items.grouped and config.grouping is not Grouping.STEP
    # What rules a rank or a micro-step: a sample, or a group where it stays in one piece there.
    load = cost_of_groups(cost, items.index, config) if together else group_max(cost, items.index)
    # Samples that should be alike: those that start a micro-step, or all of a padded one.
    padded = config.layout is Layout.PADDED
    members = int(np.median(np.bincount(items.index))) if items.grouped else 1
    alike = (config.micro_batch_size or tuning.ALIKE_IN_BUDGET) if padded else 1
    pool = Pool(
        cost=load,
        order=by_cost if not items.grouped else np.argsort(-load, kind="stable"),
        age=np.where(items.left > 0, items.skips / np.maximum(items.skips + items.left, 1), 1.0),
        forced=forced,
        neighbours=max(config.dp_size * alike // members, config.dp_size if together else 1),
        columns=config.micro_batch_size is not None and config.sync is Sync.MICRO_STEP,
        share=items.share,
    )
    judge = _judge(window, cost, by_cost, items, config)
    for each in select(pool, count, lambda keep: judge(realise(keep)), bound):
        yield replace(each, keep=realise(each.keep)[items.index])


def must_take(window: Window, cost: FloatArray, config: PlanConfig, take: int) -> int:
    """How many of `take` samples, or groups, go now if none is to be passed over too often.

    Later steps take as many at most, so it may be more than those that are due in this one.
    """
    items = _Items(window, cost, config, take)
    return int(items.size[items.due(take)].sum())


class _Items:
    """What is chosen: groups that stay whole, or each sample as one.

    index: int64[n], item of each sample. size: what each counts as. left: skips that each may still
    suffer: those of a group's most urgent sample. samples: of the step; share: what a rank has of
    these.
    """

    def __init__(self, window: Window, cost: FloatArray, config: PlanConfig, take: int) -> None:
        """Of a step that takes so many samples, or groups, each of size one."""
        self.grouped = config.grouping is not Grouping.IGNORE and bool((window.group >= 0).any())
        self.index = index = group_index(window.group) if self.grouped else np.arange(len(window))
        self.size, self.samples = np.bincount(index), float(take)
        if self.grouped and config.by_groups:
            self.samples = take * len(window) / len(self.size)
            self.size = np.ones_like(self.size)
        self.share = float(cost.mean()) * self.samples / config.dp_size
        bound = np.full(len(window), config.max_skips)
        if config.outlier_max_skips is not None:
            bound[cost > self.share] = config.outlier_max_skips
        self.skips = group_max(window.skips, index)
        self.left = -group_max(window.skips - bound, index)
        self.must_go = group_max(window.must_go.astype(np.int64), index) > 0

    def due(self, take: int) -> BoolArray:
        """Those that have to go now, as every later step takes so many samples at least."""
        most = int(self.size.max())
        surely = take - most + 1 if np.ptp(self.size) else take - take % most
        return due(self.left, self.must_go, max(surely, 1), self.size)

    def filled(self, first: BoolArray, forced: BoolArray, take: int) -> BoolArray:
        """Those that are forced, then the `first`, the oldest before others, as far as they fit."""
        if self.size.max() == 1:
            return keep_oldest(forced, take, np.flatnonzero(first))
        urgency = np.lexsort((self.left, ~forced))[: np.count_nonzero(forced)]
        others = np.argsort(~first, kind="stable")
        order = np.concatenate((urgency, others[~forced[others]]))
        return fill_exactly(order, forced, self.size, take)


def _judge(
    window: Window, cost: FloatArray, by_cost: IntArray, items: _Items, config: PlanConfig
) -> Judge:
    """Waiting that a good split of what a mask of items keeps will have, over a mean batch's work.

    Not over the batch's own work: taking the dear samples early would seem to wait less, and it
    is the sum over all steps that counts.
    """
    order, load, tokens, own = by_cost, cost, window.tokens, config
    grouping = config.grouping if items.grouped else Grouping.IGNORE
    whole = grouping is Grouping.MICRO_BATCH
    if whole:
        load, own = cost_of_groups(cost, items.index, config), config_of_items(items.size, config)
        order, tokens = np.argsort(-load, kind="stable"), np.bincount(items.index)
        if config.micro_batch_tokens is not None:
            tokens = np.bincount(items.index, weights=window.tokens).astype(np.int64)
    x, s = load[order], tokens[order]
    work = float(x.sum()) * items.samples / len(window)
    by_item = np.bincount(items.index, weights=cost).astype(np.float64)

    def judge(keep: BoolArray) -> float:
        kept = (keep if whole else keep[items.index])[order]
        time = estimate(x[kept], s[kept], own)
        if grouping is Grouping.RANK:
            time = max(time, rank_bound(-np.sort(-by_item[keep]), config.dp_size))
        return (time * config.dp_size - float(x[kept].sum())) / (work or 1.0)

    return judge


def due(left: IntArray, must_go: BoolArray, take: int, size: IntArray) -> BoolArray:
    """Items that have to go now, most urgent first where they are more than `take` samples.

    For every j, of the samples with at most j skips left all but j * take go now: the j steps
    that remain before the last of them is due can take no more. What else must go does as far as
    these leave room: that nobody is passed over too often is a promise, and it is none.
    Example: take 2, skips left 0 1 1 1: the first is due, and of the four with at most one skip
    left 4 - 1 * 2 = 2 must go: the first and one more.
    """
    forced, samples = np.zeros(len(left), dtype=bool), int(size.sum())
    if samples > int(left.min(initial=samples)) * take:  # the first deadline leaves some no room
        rest = -(-samples // take)  # with so many skips left nothing has to go
        urgency = np.clip(left, 0, rest)
        held = np.bincount(urgency, weights=size).cumsum()
        need = float((held - np.arange(len(held)) * take).max())
        order = urgency.argsort(kind="stable")
        before = size[order].cumsum() - size[order]
        forced[order[before < min(need, take)]] = True
    if must_go.any():
        others = np.flatnonzero(must_go & ~forced)
        before = size[others].cumsum() - size[others] + int(size[forced].sum())
        forced[others[before < take]] = True
    return forced


def select(
    pool: Pool, take: int, judge: Judge, bound: LossBound | None = None
) -> Iterator[Selection]:
    """The `take` items that leave together with the least waiting; then others, the best first.

    bound: all of them keep it as far as what is forced lets them.
    """

    def judged(candidate: BoolArray) -> Selection:
        keep = candidate if bound is None else bound.within(candidate, pool.forced)
        later = debt(pool, keep)
        return Selection(keep, judge(keep) + later, later)

    found, candidates = list[Selection](), map(judged, of(pool, take))
    for each in candidates:
        found.append(each)
        if each.total <= tuning.LEVEL:
            break
    found.sort(key=lambda each: each.total)
    yield found[0]
    yield from sorted([*found[1:], *candidates], key=lambda each: each.total)


def of(pool: Pool, take: int) -> Iterator[BoolArray]:
    """The oldest; where waiting comes from outliers the lane; what the column DP keeps."""
    forced, order, spare = pool.forced, pool.order, len(pool.order) - take
    yield keep_oldest(forced, take)
    if spare <= 0:
        return
    outliers = bool(pool.cost.max() > pool.share)
    most = max(min(take // (tuning.HELD if outliers else tuning.HELD_FOR_SHAPE), spare), 1)
    counts = [most >> i for i in range(0, most.bit_length(), 2)][:: 1 if outliers else -1]
    for held in (0, *counts):
        for company in () if pool.columns else (0, *tuning.COMPANY):
            if (held and forced.any()) or bool(held) != bool(company):
                first = order[held : held + company * pool.neighbours]
                yield keep_oldest(forced, take, first, order[:held])
    x, age = pool.cost[order], pool.age[order]
    G, mean = pool.neighbours, float(x.mean())
    penalty = mean * age**2
    penalty[forced[order]] += len(x) * x[0]
    for together in (0, tuning.WATCHED * G) if forced.any() else (0,):
        penalty[:together] += len(x) * mean
        yield keep_oldest(forced, take, order[tightest(x, penalty, take, G)])


def debt(pool: Pool, keep: BoolArray) -> float:
    """What the worst of the heaviest that stay behind may cost later, as excess."""
    heavy = pool.order[: (tuning.WATCHED + 1) * pool.neighbours]
    watched = heavy[: -pool.neighbours]
    if not pool.forced[watched].any():
        return 0.0
    less = pool.cost[watched] - pool.cost[heavy[pool.neighbours :]]
    charge = pool.age[watched] * less / (pool.share or 1.0)
    return float(charge[~keep[watched]].max(initial=0.0))


def keep_oldest(
    forced: BoolArray, take: int, first: IntArray | None = None, last: IntArray | None = None
) -> BoolArray:
    """Mask of `take` items: those `forced`, then `first`, then the oldest, `last` at the end."""
    turn = np.ones(len(forced), dtype=np.int8)
    if last is not None:
        turn[last] = 2
    if first is not None:
        turn[first] = 0
    turn[forced] = -1
    keep = np.zeros(len(forced), dtype=bool)
    keep[turn.argsort(kind="stable")[:take]] = True
    return keep


def tightest(
    x: FloatArray, penalty: FloatArray, take: int, G: int, price: float | None = None
) -> IntArray:
    """Which of the items of falling cost `x` to keep, int64[take], rising.

    penalty: cost of skipping each item. price: of skips that are all ahead of their share, or all
    behind (default: `tuning.SKIPS`): a multiple of what the window would wait if all of it left in
    columns, as little should be paid where little can be saved.
    """
    N = len(x)
    E, columns = N - take, -(-take // G)
    skipped = np.unique(np.linspace(0, E, min(E, tuning.STATES) + 1).astype(np.int64))
    ends = (1 + np.arange(columns) // tuning.SINGLE_COLUMNS).cumsum()
    ends = G * np.append(0, np.unique(np.minimum(ends, columns)))
    taken = np.minimum(ends, take)
    heads, sums = _strided_sums(x, G, N + G), running_sums(x + penalty)
    begun = G * heads[skipped + ends[:, None]] - sums[skipped + taken[:, None]]
    waits, work = G * float(x[::G].sum()) - float(x.sum()), float(x.sum())
    price = tuning.SKIPS if price is None else price
    price *= max(waits, tuning.LEVEL * work) / (max(N * E, 1) * len(ends))
    ahead = skipped - E * taken[:, None] / take
    band = max(tuning.BAND * N, float(np.diff(taken).max()) * E / take) + 2
    led = np.where(np.abs(ahead) > band, np.inf, price * ahead**2)
    costs, best = np.diff(begun, axis=0) + led[1:], led[0]
    for run in costs:
        np.add(run, best, run)
        best = np.minimum.accumulate(run)
    states, state = [], len(best) - 1
    for run in costs[::-1]:
        state = int(run[: state + 1].argmin())
        states.append(state)
    kept: IntArray = np.arange(take) + skipped[states[::-1]].repeat(np.diff(taken))
    return kept


def _strided_sums(x: FloatArray, G: int, end: int) -> FloatArray:
    """H[i] = x[i-G] + x[i-2G] + ... for i below `end`, as if zeros followed.

    So the first items of the columns from item i to j, whole columns later, sum up to H[j] - H[i].
    """
    padded = np.zeros((-(-end // G) + 1) * G)
    padded[G : G + len(x)] = x
    return padded.reshape(-1, G).cumsum(axis=0).ravel()


def fill_exactly(preferred: IntArray, forced: BoolArray, size: IntArray, take: int) -> BoolArray:
    """Whole groups, in order of preference, that together come as close to `take` as can be.

    Subset sums as bits of one integer: bit t of reach[i] says that the groups from the i-th on
    can total t samples. A group is taken if the best total can still be reached after it.
    Example: sizes 3 2 2 in this order, take 4: 4 can be reached by 2 + 2 only, so 3 is left out.
    """
    chosen = np.zeros(len(size), dtype=bool)
    for g in preferred[forced[preferred]].tolist():
        if size[g] <= take:
            chosen[g] = True
            take -= int(size[g])
    rest = preferred[~forced[preferred]]
    sizes = size[rest].tolist()
    mask = (1 << (take + 1)) - 1
    reach = [1]
    for count in reversed(sizes):
        reach.append((reach[-1] | reach[-1] << count) & mask)
    reach.reverse()
    left = reach[0].bit_length() - 1
    for g, count, after in zip(rest.tolist(), sizes, reach[1:], strict=True):
        if count <= left and after >> (left - count) & 1:
            chosen[g] = True
            left -= count
    return chosen
