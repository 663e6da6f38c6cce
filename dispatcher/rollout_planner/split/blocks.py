"""Giants over several ranks: micro-batches that a block of DP ranks trains together.

In each micro-step the ranks are cut into blocks of 1, 2, 4 ... ranks; one of k ranks begins at a
multiple of k. A block trains one packed micro-batch (context parallel), of at most k times the
token budget, in 1/k of the time that one rank would take, and `overhead` of that more for each
doubling. What is in a block of k > 1 is padded to 2 * k pieces, so that each rank has two of them
of one size, one of the beginning and one of the end (zigzag).

Invariant: each sample is in one block, each block within its budget; every rank has as many
micro-batches.

A pace is assumed for all micro-steps: what one rank cannot keep up with takes the smallest block
that can, the largest blocks first, each in the micro-step with most ranks left. All other samples,
the dearest first, go where they would be done first (Graham 1969; of machines that differ in speed
Gonzalez, Ibarra & Sahni 1977). Of several paces and numbers of micro-steps the shortest step is
taken.

Example, R = 4, cost = tokens, no overhead: 16 3 3 2 take a step of 16 on ranks of their own; with
blocks 16 is on two ranks for 8, beside 3 2 and 3.
"""

from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

import numpy as np

from rollout_planner import tuning
from rollout_planner.split.padded import begin_cost
from rollout_planner.types import FloatArray, IntArray, Plan, PlanConfig, Sync, round_up


@dataclass(slots=True)
class Block:
    """One micro-batch of 2**doublings ranks from `first` on. load: its time; room: in tokens."""

    step: int
    first: int
    doublings: int
    room: int
    load: float = 0.0
    samples: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> range:
        """Those that train it together."""
        return range(self.first, self.first + (1 << self.doublings))


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What each sample takes of blocks of each size, by doublings: time and tokens, [e, n].

    budget: tokens of a micro-batch for each of its ranks. longest: the same of a single sample.
    dearest_first: int64[n].
    """

    time: FloatArray
    tokens: IntArray
    budget: int
    longest: int
    dearest_first: IntArray

    @classmethod
    def of(
        cls,
        tokens: IntArray,
        config: PlanConfig,
        most: int,
        overhead: float,
        longest: int | None = None,
    ) -> "BlockWork":
        """For blocks of at most `most` ranks; by default a sample may fill its micro-batch."""
        doublings = min(most, config.dp_size).bit_length()
        pieces = [2 << e if e else 1 for e in range(doublings)]
        s = np.array([round_up(tokens, config.sample_length_multiple * each) for each in pieces])
        share = ((1 + overhead) / 2) ** np.arange(doublings)
        time = np.array([config.cost(each) for each in s]) * share[:, None]
        budget, order = config.micro_batch_tokens or 1, np.argsort(-time[0], kind="stable")
        return cls(time, s, budget, budget if longest is None else longest, order)

    @property
    def most_doublings(self) -> int:
        """Of the largest block."""
        return len(self.time) - 1

    def doublings(self, pace: float) -> IntArray:
        """Of the smallest block that has room and keeps the pace for each sample, or the last."""
        most = self.longest << np.arange(len(self.time))[:, None]
        fits = self.tokens <= most
        keeps = fits & (self.time <= pace)
        return np.where(keeps.any(axis=0), keeps.argmax(axis=0), self.most_doublings)


def in_blocks(
    work: BlockWork, config: PlanConfig, begin: float, least: float
) -> list[list[list[int]]] | None:
    """Samples as [dp rank][micro-batch] of the shortest step; None: none takes less than `least`.

    There is one where `least` is infinite: of enough micro-steps each sample has one to itself.
    begin: what it costs to begin a micro-step, which counts.
    """
    R, found = config.dp_size, None
    even, fewest = float(work.time[0].sum()) / R, -(-int(work.tokens[0].sum()) // (R * work.budget))
    every = np.arange(len(work.dearest_first))
    for more in count():
        if more > tuning.MORE_TRIED:
            if least < np.inf:
                break
            fewest += fewest // 8
        M, tried = config.micro_batches(fewest + more), np.zeros_like(every) - 1
        for pace in even / M * tuning.PACES:
            doublings = work.doublings(pace)
            if (doublings == tried).all():
                continue
            tried = doublings
            level = float((work.time[doublings, every] * (1 << doublings)).sum()) / R
            if begin * M + level >= least or (blocks := _dealt(work, doublings, R, M)) is None:
                continue
            time, samples = _arranged(blocks, R, M, config.sync)
            if begin * M + time < least:
                least, found = begin * M + time, samples
    return found


def with_blocks(plain: Plan, tokens: IntArray, config: PlanConfig) -> Plan:
    """The plan of the same samples in blocks where that is shorter, or a sample has no other room.

    tokens: of each sample of the window.
    """
    own = np.sort(plain.chosen)
    work = BlockWork.of(tokens[own], config, config.max_split, config.split_overhead)
    begin = begin_cost(work.time[0], work.tokens[0], work.budget, config.cost)
    fits = work.tokens[0].max() <= work.budget
    least = plain.time + begin * plain.num_micro_batches if fits else np.inf
    found = in_blocks(work, config, begin, least)
    if found is None:
        return plain
    # Ranks of a block have the same samples, and an idle one has what no other has.
    firsts = [[part[0] if part else -1 - at for part in rank] for at, rank in enumerate(found)]
    first = np.array(firsts, dtype=np.int64)
    cp_sizes: IntArray = (first[:, None] == first[None]).sum(axis=1)
    counts, cost, order = np.zeros_like(cp_sizes), np.zeros(cp_sizes.shape), list[int]()
    for rank, parts in enumerate(found):
        for m, part in enumerate(parts):
            size = int(cp_sizes[rank, m])
            cost[rank, m] = work.time[size.bit_length() - 1, part].sum()
            if rank % size == 0:
                counts[rank, m] = len(part)
                order += part
    return replace(
        plain,
        chosen=own[order],
        counts=counts,
        cost=cost,
        lower_bound=float(work.time[0].sum()) / config.dp_size,
        cp_sizes=cp_sizes if (cp_sizes > 1).any() else None,
    )


def _dealt(work: BlockWork, doublings: IntArray, R: int, M: int) -> list[Block] | None:
    """Blocks that have all samples; None if one finds no room."""
    blocks, taken = list[Block](), [0] * M
    giants = work.dearest_first[doublings[work.dearest_first] > 0]
    placed = np.zeros(len(doublings), dtype=bool)
    for i in giants[np.argsort(-doublings[giants], kind="stable")].tolist():
        e = int(doublings[i])
        step = taken.index(min(taken))
        if taken[step] + (1 << e) <= R:
            room = max(work.budget << e, int(work.tokens[e, i]))  # oversize, alone
            blocks.append(Block(step, taken[step], e, room))
            taken[step] += 1 << e
            _put(work, blocks[-1], i)
            placed[i] = True
    for step, first in enumerate(taken):
        blocks += [Block(step, rank, 0, work.budget) for rank in range(first, R)]
    rest = work.dearest_first[~placed[work.dearest_first]]
    return blocks if _put_where_first_done(work, blocks, rest.tolist()) else None


def _put(work: BlockWork, block: Block, i: int) -> None:
    block.samples.append(i)
    block.load += float(work.time[block.doublings, i])
    block.room -= int(work.tokens[block.doublings, i])


def _put_where_first_done(work: BlockWork, blocks: list[Block], samples: list[int]) -> bool:
    """Whether all find room. Of each size only the block that has least is asked."""
    heaps: dict[int, list[tuple[float, int]]] = {}
    full: dict[int, list[tuple[int, int]]] = {}  # those without room for the sample before
    for at, block in enumerate(blocks):
        heaps.setdefault(block.doublings, []).append((block.load, at))
        full[block.doublings] = []
    for heap in heaps.values():
        heapify(heap)
    time, tokens = work.time.tolist(), work.tokens.tolist()
    for i in samples:
        soonest, chosen = np.inf, -1
        for e, heap in heaps.items():
            needed = tokens[e][i]
            while full[e] and -full[e][0][0] >= needed:
                at = heappop(full[e])[1]
                heappush(heap, (blocks[at].load, at))
            while heap and blocks[heap[0][1]].room < needed:
                at = heappop(heap)[1]
                heappush(full[e], (-blocks[at].room, at))
            if heap and heap[0][0] + time[e][i] < soonest:
                soonest, chosen = heap[0][0] + time[e][i], e
        if chosen < 0:
            return False
        at = heaps[chosen][0][1]
        _put(work, blocks[at], i)
        heapreplace(heaps[chosen], (blocks[at].load, at))
    return True


def _arranged(
    blocks: list[Block], R: int, M: int, sync: Sync
) -> tuple[float, list[list[list[int]]]]:
    """When the last rank is done, and the samples of each rank; micro-steps with giants first.

    A block begins when its last rank is there. Single ranks' micro-batches of a micro-step go the
    dearest to the rank that is there first.
    """
    steps = [[block for block in blocks if block.step == step] for step in range(M)]
    steps.sort(key=lambda each: -sum(1 << b.doublings for b in each if b.doublings))
    found: list[list[list[int]]] = [[] for _ in range(R)]
    clock = np.zeros(R)
    for step in steps:
        single = sorted((b for b in step if not b.doublings), key=lambda block: -block.load)
        ranks = np.array([block.first for block in single], dtype=np.int64)
        for block, rank in zip(single, ranks[clock[ranks].argsort(kind="stable")], strict=True):
            block.first = int(rank)
        for block in step:
            own = slice(block.first, block.ranks.stop)
            clock[own] = clock[own].max() + block.load
            for rank in block.ranks:
                found[rank].append(block.samples)
        if sync is Sync.MICRO_STEP:
            clock[:] = clock.max()
    return float(clock.max()), found
