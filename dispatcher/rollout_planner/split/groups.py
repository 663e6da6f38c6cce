"""Splitting when groups stay together: on one DP rank, or in one micro-batch.

Invariant: all samples of a group are on the same rank (in the same micro-batch); micro-batches hold
at most what they may, or a single sample (group) that alone exceeds it, and there are as many on
every rank: the fewest for which a way is found.

*On one rank.* A whole group is an item with a load, what its samples cost, and a weight, what they
take of the room of a rank: samples, or tokens. Items go to ranks greedily, by differences, or in
turn; swaps level the ranks. Then each rank's samples are filled into its micro-batches: dearest
first, to levels that ranks agree on where they wait at every micro-step. Padded ones are runs of
neighbours. The way that takes the least time is the plan.

Where ranks wait at every micro-step, they should be alike in their large samples as well. Cut into
layers of cost, each group has a vector of what its samples reach into each layer; these add up over
a rank's groups, and the sum over layers of the largest is what single samples take, sorted. With
one layer it is the load of the most loaded rank.
Example, R = 2, M = 2: ranks with costs 9 2 1 and 6 3 3 agree on 9 and 3, so they have 9 | 2 1 and
6 3 | 3. Groups 9 8, 9 8, 2 1 and 2 1: 9 9 8 8 beside 2 2 1 1 takes 34, 9 8 2 1 on both takes 20.

*Cut in order* is what trainers do without a plan: each rank's samples as they come, into the next
micro-batch (next fit) or the first that has room (first fit).
Example, budget 10, tokens 6 5 4 3: next fit cuts 6 | 5 4 | 3, first fit packs 6 4 | 5 3.

*In one micro-batch.* A group becomes an item with the tokens and the cost of its members together,
or of its longest as often as it has members where the layout pads, and is split as samples are
elsewhere. With a fixed micro-batch size, groups of one size are so many items a micro-batch; groups
of different sizes are packed as under a token budget, with samples for tokens.
Example: micro-batches of 8 samples hold two groups of 4 each, or one of 5 beside one of 3.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from rollout_planner import tuning
from rollout_planner.errors import PlanError
from rollout_planner.objective import micro_batches_for
from rollout_planner.order import by_label, group_max, running_sums
from rollout_planner.split import assign
from rollout_planner.split.karmarkar_karp import differencing_labels
from rollout_planner.split.packing import fewest_micro_batches
from rollout_planner.split.padded import price_of
from rollout_planner.split.parts import Batch, Padded, Parts, Work, room_for, time_of
from rollout_planner.split.recut import recut
from rollout_planner.types import (
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    PlanConfig,
    Sync,
    cut,
    step_time,
)

#: Falling load of each group, what it weighs, R, cap -> rank of each; None: no room.
Share = Callable[[FloatArray, IntArray, int, int], IntArray | None]


def by_neighbours(load: FloatArray, _weight: IntArray, R: int, _cap: int) -> IntArray:
    """Equal-count KK; groups without cost fill the count up."""
    labels = differencing_labels(np.append(load, np.zeros(-len(load) % R)), R, equal_size=True)
    return labels[: len(load)]


def by_differences(load: FloatArray, _weight: IntArray, R: int, _cap: int) -> IntArray:
    """Unequal KK."""
    return differencing_labels(load, R, equal_size=False)


def in_turn(_load: FloatArray, weight: IntArray, R: int, cap: int) -> IntArray | None:
    """Each to the next rank; if one has no room for all of its own to those that have fewest."""
    turns = np.arange(len(weight)) % R
    if np.bincount(turns, weight).max() <= cap:
        return turns
    return assign.lpt_budget(np.ones(len(weight)), weight, R, cap)


def split_by_rank(batch: Batch, config: PlanConfig, work: Work, /) -> Parts:
    """Micro-batches of ranks that hold whole groups. work: pays for cutting padded ones anew."""
    task = _Task(batch, config)
    M = task.fewest()
    while not (found := task.found(M, work)):
        M += config.micro_batch_multiple
    if not (task.counts or task.cuts) and (enough := task.enough()) > M:
        found += task.found(enough, work)
    found.sort(key=lambda each: price_of(batch, each, config))
    if task.pads:
        found += [recut(batch, parts, config, work) for parts in found[:2]]
    return min(found, key=lambda each: price_of(batch, each, config))


def split_plainly(
    batch: Batch, config: PlanConfig, share: Share, *, as_came: bool = False
) -> Parts:
    """As methods to compare with have it, with or without groups: each rank cuts its own samples.

    Groups go by falling load and samples by falling tokens, or both as they came.
    """
    task, sequence = _Task(batch, config), np.arange(len(batch)) if as_came else batch.order
    order = np.arange(len(task.load)) if as_came else np.argsort(-task.load, kind="stable")
    M = task.fewest() if config.micro_batch_size else len(batch)
    while (way := task.shared(share, order, M * task.cap)) is None:
        M += config.micro_batch_multiple
    return cut_ranks(task.samples(way, sequence), M, batch, config, as_came=as_came)


class _Task:
    """What is to be split; where nothing stays together each sample is a group.

    weight: what each sample takes of its micro-batch, at most `cap`. load and held: what the
    samples of each group cost and take together. waits_often: whether ranks wait for each other at
    every micro-step. counts: whether micro-batches have room for so many samples, whatever their
    tokens. pads: whether it matters who shares a micro-batch with a long sample. cuts: whether a
    rank's micro-batches are runs of neighbours: they may be any, or pad.
    """

    def __init__(self, batch: Batch, config: PlanConfig) -> None:
        self.batch, self.config = batch, config
        self.group = np.arange(len(batch)) if batch.group is None else batch.group
        self.weight, self.cap = room_for(batch, config)
        self.load = np.bincount(self.group, weights=batch.cost).astype(np.float64)
        self.held = np.bincount(self.group, weights=self.weight).astype(np.int64)
        self.waits_often = config.sync is Sync.MICRO_STEP
        self.counts, single = config.micro_batch_tokens is None, config.micro_batch_size == 1
        self.pads = config.layout is Layout.PADDED and not single
        once = self.counts and not self.waits_often and config.pipeline_stages == 1
        self.cuts = self.pads or single or once

    def fewest(self) -> int:
        """Bound on the micro-batches of a rank: of the whole batch, and of its largest group."""
        config = self.config
        if self.counts:
            M = micro_batches_for(len(self.batch), config)
        else:
            M = fewest_micro_batches(self.batch.tokens, config.dp_size, self.cap)
        return config.micro_batches(max(M, -(-int(self.held.max()) // self.cap)))

    def enough(self) -> int:
        """Micro-batches under a budget that have room for ranks of level cost."""
        level = self.ways(len(self.batch))[0]
        return self.config.micro_batches(-(-int(np.bincount(level, self.held).max()) // self.cap))

    def found(self, M: int, work: Work) -> list[Parts]:
        """M micro-batches of each rank, by each way that finds room for all."""
        ways, found = self.ways(M), list[Parts]()
        price = tuning.ONCE + tuning.SAMPLE * len(self.batch)
        for way in ways[: None if self.waits_often or self.cuts else 1]:
            if found and not (self.cuts or work.affords(price)):
                break
            if self.cuts:
                parts: Parts | None = self.cut(way, M)
            else:
                parts = self.filled(self.samples(way, self.batch.order), M)
            found += [] if parts is None else [parts]
        if found and self.cuts and self.counts and self.waits_often:
            times = [time_of(self.batch, parts, self.config) for parts in found]
            layers = layers_of(self.batch.cost, self.group)
            way = alike(
                ways[int(np.argmin(times))], layers, self.held, self.config.dp_size, M * self.cap
            )
            found.append(self.cut(way, M))
        return found

    def ways(self, M: int) -> list[IntArray]:
        """Rank of each group, int64[groups], by each way that finds room for all."""
        R, order = self.config.dp_size, np.argsort(-self.load, kind="stable")
        room = (len(self.batch) if self.config.pads_to_budget else M) * self.cap
        found = []
        for share in (assign.lpt_budget, by_neighbours, by_differences):
            way = self.shared(share, order, room)
            if way is not None:
                way = assign.levelled(way, self.load, R, self.held, room)
                found.append(alike(way, self.load[:, None], self.held, R, room))
        return sorted(found, key=lambda way: np.bincount(way, self.load).max())

    def shared(self, share: Share, order: IntArray, room: int) -> IntArray | None:
        """Rank of each group, which are shared out in this order; evenly by weight if need be."""
        load, held, R = self.load, self.held, self.config.dp_size
        ranks = share(load[order], held[order], R, room)
        if ranks is None or np.bincount(ranks, weights=held[order]).max() > room:
            order = np.lexsort((-load, -held))
            ranks = assign.fill_sets(
                held[order].astype(np.float64), held[order], np.zeros_like(order), R, room
            )
        if ranks.min() < 0:
            return None
        way = np.empty_like(ranks)
        way[order] = ranks
        return way

    def samples(self, way: IntArray, sequence: IntArray) -> list[IntArray]:
        """Samples of each rank, in this sequence, for a way to share groups out."""
        of, R = way[self.group[sequence]], self.config.dp_size
        return cut(sequence[by_label(of, R)], np.bincount(of, minlength=R).tolist())

    def cut(self, way: IntArray, M: int) -> Parts:
        """Runs of neighbours on each rank, as full as can be."""
        return cut_ranks(self.samples(way, self.batch.order), M, self.batch, self.config)

    def filled(self, ranks: list[IntArray], M: int) -> Parts | None:
        """M micro-batches of each of these ranks, falling by cost, as level as may be."""
        level, x = self.levels(ranks, M), np.append(self.batch.cost, 0.0)
        ids, rank_of, place = np.concatenate(ranks), _ranks_of(ranks), np.empty(len(x) - 1, int)
        labels = assign.fill_sets(
            x[ids], self.weight[ids], rank_of, M, self.cap, start=level[0] - level
        )
        if labels.min() < 0:
            return None
        place[ids] = labels + rank_of * M
        bins = assign.members(place, len(ranks) * M).reshape(len(ranks), M, -1)
        best, least = bins, np.inf
        means = x[bins].sum(axis=2).mean(axis=0)
        for target in (None, level, means) if self.waits_often else (None,):
            if target is not None:
                base, w = np.broadcast_to(target[0] - target, bins.shape[:2]), self.weight
                assign.swap_level(
                    bins, x, np.append(w, 0), self.cap, base=base, enough=tuning.LEVEL
                )
            falling = np.argsort(-x[bins].sum(axis=2), axis=1, kind="stable")
            bins = np.take_along_axis(bins, falling[:, :, None], 1)
            time = step_time(x[bins].sum(axis=2), self.config.sync)
            if time < least:
                best, least = bins.copy(), time
        there = best < len(place)
        return Parts(best[there], there.sum(axis=2))

    def levels(self, ranks: list[IntArray], M: int) -> FloatArray:
        """What each of M micro-steps should cost, falling: the largest sample that any rank has
        left, or an even share of what the most loaded rank has left.
        """
        cost, largest = self.batch.cost, np.zeros(M)
        most = max(float(cost[ids].sum()) for ids in ranks)
        for ids in ranks if self.waits_often else []:
            first = cost[ids[:M]]
            np.maximum(largest[: len(first)], first, out=largest[: len(first)])
        return assign.levels(np.append(largest, most - largest.sum()), 1, M)


def layers_of(cost: FloatArray, group: IntArray) -> FloatArray:
    """What the samples of each group reach into each layer of cost, float64[groups, layers]."""
    falling = -np.sort(-cost)
    places = np.linspace(0, 1, tuning.LAYERS + 1)[1:] ** 2 * (len(falling) - 1)
    edges = np.unique(np.concatenate((falling[places.astype(np.int64)], [0.0, falling[0]])))
    reach = [
        np.bincount(group, weights=np.clip(cost, low, high) - low) for low, high in pairwise(edges)
    ]
    return np.array(reach, dtype=np.float64).reshape(len(reach), int(group.max()) + 1).T


def alike(way: IntArray, layers: FloatArray, weight: IntArray, R: int, cap: int) -> IntArray:
    """Rank of each group after swaps that lower the sum over layers of the largest rank.

    layers: float64[groups, layers]. Each is the best of the rank that adds most to the measure; a
    rank has an empty group besides, so that a swap with it is a move.
    """
    (G, L), own = layers.shape, np.arange(R)
    if R == 1 or not L or G * (G // R + 1) * L > tuning.TOO_MANY_SLOTS:
        return way  # ranks of many groups are alike
    reach, held = np.vstack((layers, np.zeros((R, L)))), np.append(weight, np.zeros_like(own))
    way, done = np.append(way, own), np.zeros(R, dtype=bool)
    ranks = np.array([reach[way == r].sum(axis=0) for r in range(R)])
    for _ in range(G):
        most, second = -np.sort(-ranks, axis=0)[:2]
        alone = np.where(ranks == most, most - second, 0.0).sum(axis=1)
        high = int(np.where(done, 0.0, alone).argmax())
        if done[high] or not alone[high] or most.sum() * R <= ranks.sum() * (1 + tuning.TOLERANCE):
            break
        mine, theirs = np.flatnonzero(way == high), np.flatnonzero(way != high)
        to, room = way[theirs], cap - np.bincount(way, weights=held)
        others = ranks.copy()
        others[high] = 0.0
        largest, second = -np.sort(-others, axis=0)[:2]
        rest = np.where(ranks == largest, second, largest)[to]
        less = reach[mine, None] - reach[theirs]
        after = np.maximum(ranks[high] - less, ranks[to] + less)
        time = np.maximum(after, rest, out=after).sum(axis=2)
        more = held[mine, None] - held[theirs]
        time[(more > room[to]) | (-more > room[high])] = np.inf
        i, j = np.unravel_index(int(time.argmin()), time.shape)
        done[high] = time[i, j] >= float(most.sum()) * (1 - tuning.TOLERANCE)
        if not done[high]:
            done[:] = False
            way[mine[i]], way[theirs[j]] = to[j], high
            way[G:] = own
            for r in (high, to[j]):
                ranks[r] = reach[way == r].sum(axis=0)
    return way[:G]


def cut_ranks(
    ranks: list[IntArray], M: int, batch: Batch, config: PlanConfig, *, as_came: bool = False
) -> Parts:
    """Each rank's samples, in their order, in micro-batches as full as the limit allows.

    M: micro-batches of a rank, where these have a fixed size. as_came: under a token budget only
    the last micro-batch is filled on.
    """
    m, budget, ids = config.micro_batch_size, config.micro_batch_tokens or 1, np.concatenate(ranks)
    rank_of, in_runs = _ranks_of(ranks), as_came or config.layout is Layout.PADDED
    if m is not None:
        own = np.concatenate([np.arange(len(each)) // m for each in ranks])
    else:
        tokens, padded = np.minimum(batch.tokens, budget), config.layout is Layout.PADDED
        if in_runs:
            own = run_of_each(tokens[ids], rank_of, budget, padded=padded)
        else:
            own = np.concatenate(
                [assign.first_fit(tokens[each], np.full(len(each), budget)) for each in ranks]
            )
        needed = assign.num_bins(own)
        if (M := config.micro_batches(needed)) > needed and not in_runs:
            spread = assign.fill_sets(batch.cost[ids], tokens[ids], rank_of, M, budget)
            own = spread if spread.min() >= 0 else own
    return Parts.of_labels(ids, rank_of * M + own, M, len(ranks))


def _ranks_of(ranks: list[IntArray]) -> IntArray:
    """Rank of each sample of these, one rank after the other."""
    return np.repeat(np.arange(len(ranks)), list(map(len, ranks)))


def run_of_each(s: IntArray, of: IntArray, budget: int, *, padded: bool) -> IntArray:
    """Run of each sample, in their order, where a run ends at the first that does not fit.

    of: set of each, one after the other, whose runs count from 0. padded: each takes as many tokens
    as the longest of its run.
    """
    runs, held, count, last = list[int](), 0, 0, -1
    for tokens, own in zip(s.tolist(), of.tolist(), strict=True):
        more = max(held, tokens) if padded else held + tokens
        if own != last:
            run, held, count, last = 0, tokens, 1, own
        elif more * (count + 1 if padded else 1) <= budget:
            held, count = more, count + 1
        else:
            run, held, count = run + 1, tokens, 1
        runs.append(run)
    return np.array(runs, dtype=np.int64)


def group_items(batch: Batch, group: IntArray, config: PlanConfig) -> tuple[Batch, PlanConfig]:
    """Groups as items, and how these are split. group: dense group number of each sample.

    Raises PlanError for a group of more samples than a micro-batch has, and for budgets of padded
    tokens: what a group takes of one depends on what it is padded to.
    """
    if config.pads_to_budget:
        raise PlanError(
            "groups that stay in one micro-batch cannot share a budget of padded tokens; set "
            "--micro-batch-size, --layout packed, or --groups rank"
        )
    size, m = np.bincount(group), config.micro_batch_size
    if m is not None and size.max() > m:
        raise PlanError(
            f"a group has {size.max()} samples and a micro-batch holds {m}; groups stay in one "
            "micro-batch, so raise --micro-batch-size to the size of a group, or set --groups rank"
        )
    own = config_of_items(size, config)
    cost, tokens = cost_of_groups(batch.cost, group, config), size
    if m is None:
        tokens = np.bincount(group, weights=batch.tokens).astype(np.int64)
    if own.micro_batch_tokens is not None:
        # Groups whose longest and whose size both differ share a micro-batch.
        pads = config.layout is Layout.PADDED
        padded = Padded(group_max(batch.cost, group), size) if pads else None
        return replace(Batch.of(cost, tokens), padded=padded), own
    return Batch(cost, tokens, None, np.argsort(-cost, kind="stable")), own


def config_of_items(size: IntArray, config: PlanConfig) -> PlanConfig:
    """How groups of these sizes are split as items."""
    m, alike = config.micro_batch_size, replace(config, grouping=Grouping.IGNORE)
    if m is None:
        return alike
    if np.ptp(size):
        return replace(alike, micro_batch_size=None, micro_batch_tokens=m, layout=Layout.PACKED)
    return replace(alike, micro_batch_size=max(m // int(size[0]), 1))


def cost_of_groups(cost: FloatArray, group: IntArray, config: PlanConfig) -> FloatArray:
    """What each group costs a micro-batch: all of its samples, padded to the longest if so laid."""
    if config.layout is Layout.PADDED:
        return group_max(cost, group) * np.bincount(group)
    return np.bincount(group, weights=cost).astype(np.float64)


def members_of_items(parts: Parts, group: IntArray) -> Parts:
    """Micro-batches of the samples of the groups that `parts` has."""
    size = np.bincount(group)
    by_group = np.argsort(group, kind="stable")
    starts = np.cumsum(size) - size
    own, counts = size[parts.sequence], parts.counts.ravel()
    held = running_sums(own)
    place = np.arange(len(group)) - np.repeat(held[:-1], own)
    sequence = by_group[np.repeat(starts[parts.sequence], own) + place]
    ends = np.cumsum(counts)
    return Parts(sequence, (held[ends] - held[ends - counts]).reshape(parts.counts.shape))
