"""Giants over several ranks: micro-batches that a block of DP ranks trains together.

In each micro-step the ranks are cut into blocks of 1, 2, 4 ... ranks; one of k ranks begins at a
multiple of k. A block trains one packed micro-batch (context parallel), of at most k times the
token budget, in 1/k of the time that one rank would take, and `overhead` of that more for each
doubling. What is in a block of k > 1 is padded to 2 * k pieces, so that each rank has two of them
of one size, one of the beginning and one of the end (zigzag).

Invariant: each sample is in one block, each block within its budget; every rank has as many
micro-batches.

A pace is assumed for all micro-steps: what one rank cannot keep up with takes the smallest block
that can, the largest blocks first, each in the first micro-step with ranks left. All other samples,
the dearest first, go where they would be done first (Graham 1969; of machines that differ in speed
Gonzalez, Ibarra & Sahni 1977). Where ranks meet at every micro-step, these last equally long, but
where a sample takes longer; the dearest micro-batches of single ranks go beside the slowest blocks.
Of several paces, the slowest first until one takes longer than the one before, and numbers of
micro-steps the shortest step is taken; swaps between single ranks end it.

Example, R = 4, cost = tokens, no overhead: 16 3 3 2 take a step of 16 on ranks of their own; with
blocks 16 is on two ranks for 8, beside 3 2 and 3.
"""

from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from rollout_planner import tuning
from rollout_planner.order import as_lists
from rollout_planner.split.assign import Kind, levelled, put
from rollout_planner.split.padded import begin_cost
from rollout_planner.types import (
    FloatArray,
    IntArray,
    MicroBatchOrder,
    Plan,
    PlanConfig,
    Sync,
    round_up,
)


def pieces_of(ranks: IntArray) -> IntArray:
    """That samples on blocks of so many ranks are padded to: two a rank, or the one."""
    return np.where(ranks > 1, 2 * ranks, 1)


def share_of(ranks: IntArray, overhead: float) -> FloatArray:
    """Time of blocks of so many ranks, over that of one rank."""
    found: FloatArray = np.power((1 + overhead) / 2, np.log2(ranks))
    return found


class BlockWork:
    """What each sample takes of blocks of each size, by doublings: time and tokens, [e, n].

    most: ranks of the largest block. shares: time of a block over that of one rank. pieces: that
    its samples are padded to. budget: tokens of a micro-batch for each of its ranks. longest: the
    same of a single sample; by default it may fill its micro-batch.
    """

    def __init__(
        self,
        tokens: IntArray,
        config: PlanConfig,
        most: int,
        overhead: float,
        longest: int | None = None,
    ) -> None:
        each = np.arange(min(most, config.dp_size).bit_length())
        self.pieces = pieces_of(1 << each)
        multiples = (config.sample_length_multiple * self.pieces).tolist()
        self.tokens = np.array([round_up(tokens, multiple) for multiple in multiples])
        self.shares = share_of(1 << each, overhead)
        self.time = np.array(list(map(config.cost, self.tokens))) * self.shares[:, None]
        self.budget = config.micro_batch_tokens or 1
        self.longest = self.budget if longest is None else longest
        self.dearest_first = np.argsort(-self.time[0], kind="stable")

    @property
    def most_doublings(self) -> int:
        """Of the largest block."""
        return len(self.time) - 1

    @property
    def all(self) -> IntArray:
        """Numbers of the samples."""
        return np.arange(len(self.dearest_first))

    def doublings(self, pace: float) -> IntArray:
        """Of the smallest block that has room and keeps the pace for each sample, or the last."""
        most = self.longest << np.arange(len(self.time))[:, None]
        fits = self.tokens <= most
        keeps = fits & (self.time <= pace)
        return np.where(keeps.any(axis=0), keeps.argmax(axis=0), self.most_doublings)


@dataclass(slots=True)
class _Blocks:
    """Micro-batches of 2**doublings ranks, from `first` on, in a micro-step.

    of: the one of each sample.
    """

    work: BlockWork
    step: IntArray
    first: IntArray
    doublings: IntArray
    of: IntArray

    def loads(self) -> FloatArray:
        """What each takes its ranks."""
        time = self.work.time[self.doublings[self.of], self.work.all]
        return np.bincount(self.of, time, len(self.step)).astype(np.float64)

    @property
    def shape(self) -> tuple[int, int]:
        """Ranks and micro-steps."""
        return int((self.first + (1 << self.doublings)).max()), int(self.step.max()) + 1

    def places(self) -> IntArray:
        """The micro-batch of each rank and micro-step, int64[R, M]."""
        size, found = 1 << self.doublings, np.empty(self.shape, dtype=np.int64)
        of = np.arange(len(size)).repeat(size)
        rank = self.first[of] + np.arange(len(of)) - (size.cumsum() - size)[of]
        found[rank, self.step[of]] = of
        return found

    def arrange(self, sync: Sync) -> float:
        """Micro-batches of single ranks where they wait least; when the last rank is done.

        A block begins when its last rank is there; micro-steps with giants come first.
        """
        R, M = self.shape
        load, single = self.loads(), np.flatnonzero(self.doublings == 0)
        wide = np.flatnonzero(self.doublings)
        single = single[np.argsort(-load[single], kind="stable")]
        if sync is Sync.MICRO_STEP:
            pace = np.zeros(M)
            np.maximum.at(pace, self.step[wide], load[wide])
            slots = np.sort(single)
            slots = slots[np.argsort(-pace[self.step[slots]], kind="stable")]
            self.step[single], self.first[single] = self.step[slots], self.first[slots]
            np.maximum.at(pace, self.step[single], load[single])
            return float(pace.sum())
        clock = np.zeros(R)
        busy = np.bincount(self.step[wide], 1 << self.doublings[wide], M)
        place = np.empty(M, dtype=np.int64)
        place[np.argsort(-busy, kind="stable")] = np.arange(M)
        self.step = place[self.step]
        for step in range(M):
            own = single[self.step[single] == step]
            ranks = np.sort(self.first[own])
            self.first[own] = ranks = ranks[clock[ranks].argsort(kind="stable")]
            clock[ranks] += load[own]
            for b in wide[self.step[wide] == step].tolist():
                block = slice(self.first[b], self.first[b] + (1 << self.doublings[b]))
                clock[block] = clock[block].max() + load[b]
        return float(clock.max())

    def levelled(self) -> "_Blocks":
        """After swaps of samples between single ranks, towards what their micro-steps take."""
        load, single, order = self.loads(), self.doublings == 0, self.work.dearest_first
        own, of = order[single[self.of[order]]], self.of.copy()
        if len(own):
            pace = np.zeros(int(self.step.max()) + 1)
            np.maximum.at(pace, self.step, load)
            x, s, place = self.work.time[0, own], self.work.tokens[0, own], single.cumsum() - 1
            of[own] = np.flatnonzero(single)[
                levelled(
                    place[of[own]], x, int(single.sum()), s, self.work.budget,
                    base=(pace.max() - pace[self.step[single]])[None], enough=tuning.LEVEL,
                )
            ]  # fmt: skip
        return replace(self, step=self.step.copy(), first=self.first.copy(), of=of)

    def listed(self) -> list[list[list[int]]]:
        """Samples as [dp rank][micro-batch]."""
        samples = as_lists(self.of, len(self.step))
        return [[samples[b] for b in rank] for rank in self.places().tolist()]


def in_blocks(work: BlockWork, config: PlanConfig, begin: float, least: float) -> _Blocks | None:
    """Blocks of the shortest step; None: none takes less than `least`.

    There is one where `least` is infinite: of enough micro-steps each sample has one to itself.
    begin: what it costs to begin a micro-step, which counts.
    """
    R, best = config.dp_size, None
    even, fewest = float(work.time[0].sum()) / R, -(-int(work.tokens[0].sum()) // (R * work.budget))
    for more in count():
        if more > tuning.MORE_TRIED:
            if least < np.inf:
                break
            fewest += fewest // tuning.EIGHTHS
        M, tried, before = config.micro_batches(fewest + more), work.all - 1, np.inf
        for pace in even / M * tuning.PACES:  # the faster, the more work
            doublings = work.doublings(pace)
            if (doublings == tried).all():
                continue
            tried = doublings
            level = float((work.time[doublings, work.all] * (1 << doublings)).sum()) / R
            if begin * M + level >= least:
                break
            blocks = _dealt(work, doublings, config, M, level)
            if blocks is None:
                continue
            if more and least < np.inf and len(np.unique(blocks.step[blocks.of])) < M:
                continue
            time = begin * M + blocks.arrange(config.sync)
            if time < least:
                least, best = time, blocks
            if time > before:
                break
            before = time
    if best is None:
        return None
    swapped = best.levelled()
    return swapped if begin * best.shape[1] + swapped.arrange(config.sync) < least else best


def with_blocks(plain: Plan, tokens: IntArray, config: PlanConfig) -> Plan:
    """The plan of the same samples in blocks where that is shorter, or a sample has no other room.

    tokens: of each sample of the window.
    """
    own = np.sort(plain.chosen)
    work = BlockWork(tokens[own], config, config.max_split, config.split_overhead)
    begin = begin_cost(work.time[0], work.tokens[0], work.budget, config.cost)
    fits = work.tokens[0].max() <= work.budget
    least = plain.time + begin * plain.num_micro_batches if fits else np.inf
    found = in_blocks(work, config, begin, least)
    if found is None:
        return plain
    places, sizes, loads = found.places(), 1 << found.doublings, found.loads()
    held = np.bincount(found.of, work.tokens[found.doublings[found.of], work.all], len(sizes))
    turns = _turns(loads[places], (held / sizes)[places], config)
    places = places[:, turns]
    cp_sizes, samples = sizes[places], np.bincount(found.of, minlength=len(sizes))
    on_first = np.arange(len(places))[:, None] % cp_sizes == 0
    at = np.empty(len(sizes), dtype=np.int64)  # of each block, rank by rank
    at[np.lexsort((np.argsort(turns)[found.step], found.first))] = np.arange(len(sizes))
    return replace(
        plain,
        chosen=own[np.argsort(at[found.of], kind="stable")],
        counts=samples[places] * on_first,
        cost=loads[places],
        lower_bound=float(work.time[0].sum()) / config.dp_size,
        cp_sizes=cp_sizes if (cp_sizes > 1).any() else None,
    )


def _turns(cost: FloatArray, held: FloatArray, config: PlanConfig) -> list[int]:
    """The order of the micro-steps that is asked for. cost, held: of each rank in each, and tokens.

    Where ranks do not meet in each, a block waits for its last rank: there the order stays.
    """
    order = config.micro_batch_order
    if order is MicroBatchOrder.AS_PLANNED or config.sync is Sync.STEP:
        return list(range(cost.shape[1]))
    size = (held if order is MicroBatchOrder.PEAK_FIRST else cost).max(axis=0)
    found: list[int] = np.argsort(-size, kind="stable").tolist()
    return found if order is MicroBatchOrder.PEAK_FIRST else found[::2][::-1] + found[1::2]


def _dealt(
    work: BlockWork, doublings: IntArray, config: PlanConfig, M: int, level: float
) -> _Blocks | None:
    """Blocks of all samples; None if one finds no room. level: what a rank has of the step."""
    R, blocks, taken = config.dp_size, list[tuple[int, int, int]](), [0] * M
    time, of = work.time[doublings, work.all], np.full(len(doublings), -1)
    giants, longest = np.flatnonzero(doublings), np.zeros(M)
    for i in giants[np.lexsort((-time[giants], -doublings[giants]))].tolist():
        e = int(doublings[i])
        step = next((step for step in range(M) if taken[step] + (1 << e) <= R), None)
        if step is not None:
            of[i] = len(blocks)
            blocks.append((step, taken[step], e))
            taken[step] += 1 << e
            longest[step] = max(longest[step], time[i])
    blocks += [(step, rank, 0) for step, used in enumerate(taken) for rank in range(used, R)]
    step_of, first_of, doublings_of = np.array(blocks).T
    found = _Blocks(work, step_of, first_of, doublings_of, of)
    placed = np.flatnonzero(of >= 0)
    share, room = work.shares[found.doublings], work.budget << found.doublings
    start = np.zeros(len(blocks))
    if config.sync is Sync.MICRO_STEP:
        longest[0] = time.max()
        lasts = _durations(longest, level)
        start = (lasts.max() - lasts)[found.step]
    start[of[placed]] += time[placed]
    start /= share
    room[of[placed]] = np.maximum(room[of[placed]] - work.tokens[doublings[placed], placed], 0)
    kinds = [
        Kind(float(work.shares[e]), int(work.pieces[e]), work.longest << e)
        for e in found.doublings.tolist()
    ]
    rest = work.dearest_first[of[work.dearest_first] < 0]
    of[rest] = put(work.time[0, rest], work.tokens[0, rest], room.tolist(), kinds, start)
    return found if of.min() >= 0 else None


def _durations(longest: FloatArray, level: float) -> FloatArray:
    """Of micro-steps in which ranks meet: as even as the longest sample of each lets them be.

    level: of all of them together; they last longer where the longest samples do.
    """
    falling, M = np.sort(longest)[::-1], len(longest)
    others = level - np.concatenate(([0.0], falling.cumsum()[:-1]))  # after so many of the longest
    found: FloatArray = np.maximum(longest, (others / np.arange(M, 0, -1)).min())
    return found
