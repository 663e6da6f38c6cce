"""Schedulers for Megatron-Core's context parallelism of several sizes, planned in blocks of ranks.

Megatron-Core asks a scheduler which ranks train each sample of a step, in groups that all ranks
begin together. `BlockScheduler` is for hybrid context parallelism, where the block of a rank trains
its samples of a group one after another, so that nothing is limited but each single sample. Read
and run: Megatron-Core 0.16.1, and commit d98e8a64dd. `PackedBlockScheduler` is for dynamic context
parallelism, where a block packs its samples into one micro-batch. Read and run: Megatron-Core's
branch dev, d48bd6be0a (#5154 is in no release yet), and the adapter of verl 0.9.1.

Invariant: every sample is in one group, on 2^k ranks that begin at a multiple of 2^k, or on all; no
rank of a group has nothing to do.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from rollout_planner.errors import SampleTooLong, UnequalPartitions
from rollout_planner.public import arguments
from rollout_planner.public.partition import balanced_partition
from rollout_planner.public.step import plan_step
from rollout_planner.split.blocks import BlockWork, in_blocks, pieces_of, share_of
from rollout_planner.tuning import SPLIT_OVERHEAD
from rollout_planner.types import CostModel, Grouping, IntArray, PlanConfig, Sync, round_up

_REMEDY = "raise max_seq_len_per_rank, or truncate the sample"
#: Samples as [group][rank][sample], unless noted otherwise.
Groups = list[list[list[int]]]


class SizedGroup(Protocol):
    """A `torch.distributed.ProcessGroup`, of which only the size is asked."""

    def size(self) -> int:
        """Its number of ranks."""
        ...


class BlockScheduler:
    """Takes the place of Megatron-Core's `BalancedCPScheduler`.

    max_seq_len_per_rank: tokens of a sample for each rank that trains it. dp_cp_group: data and
    context parallel ranks together. cost: work of a length; quadratic by default.
    split_overhead: what each doubling of the ranks of a sample costs, as a share of its time.
    """

    def __init__(
        self,
        max_seq_len_per_rank: int,
        dp_cp_group: SizedGroup,
        *,
        cost: CostModel | str | None = None,
        split_overhead: float = SPLIT_OVERHEAD,
    ) -> None:
        self._longest = arguments.token_budget(max_seq_len_per_rank=max_seq_len_per_rank)
        self._ranks, self._overhead = dp_cp_group.size(), split_overhead
        self._cost = arguments.cost_model(cost)

    def get_groups_and_subsamples(
        self,
        sample_id_seqlens: Sequence[tuple[int, int]],
        config: object = None,  # noqa: ARG002  Megatron-Core passes its own
    ) -> tuple[Groups, Groups]:
        """Lengths and ids of samples, each as [group][rank][sample], from (id, length) of each.

        Raises SampleTooLong for one that all ranks together cannot hold, and UnequalPartitions
        where too few samples leave a rank without one.
        """
        ids, lengths, tokens, groups = _by_group(sample_id_seqlens, self._planned)
        busy = [_all_busy(group, tokens, self._cost) for group in groups]
        planned = [group for group in busy if group is not None]
        if len(planned) < len(groups):
            raise UnequalPartitions(
                f"{len(tokens)} samples cannot keep {self._ranks} ranks busy in blocks of 2^k"
            )
        return (
            [[[lengths[i] for i in rank] for rank in group] for group in planned],
            [[[ids[i] for i in rank] for rank in group] for group in planned],
        )

    def _planned(self, tokens: IntArray) -> Groups:
        """Indices as [rank][group][sample]."""
        ample = 2 * int(tokens.sum())
        step = PlanConfig(
            self._ranks,
            len(tokens),
            self._cost,
            micro_batch_tokens=ample,
            grouping=Grouping.IGNORE,
            sync=Sync.MICRO_STEP,
        )
        work = BlockWork(tokens, step, self._ranks, self._overhead, self._longest)
        most = self._longest << work.most_doublings
        if tokens.max() > most:
            raise SampleTooLong(int(tokens.max()), most, _REMEDY)
        alone, least = list[list[int]](), np.inf
        if tokens.max() <= self._longest and len(tokens) >= self._ranks:
            alone = balanced_partition(work.time[0], self._ranks, equal_size=False)
            least = max(float(work.time[0][rank].sum()) for rank in alone)
        found = in_blocks(work, step, 0.0, least)
        return [[rank] for rank in alone] if found is None else found.listed()


class PackedBlockScheduler:
    """Takes the place of Megatron-Core's `DefaultDynamicCPScheduler`, or plans for its subclass.

    max_seqlen_per_dp_cp_rank: tokens of a micro-batch for each rank that trains it. cp_size,
    dp_size: of the ranks, their product. microbatch_group_size_per_vp_stage: the number of groups
    is a multiple of it. cost, split_overhead: as of `BlockScheduler`.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
        *,
        cost: CostModel | str | None = None,
        split_overhead: float = SPLIT_OVERHEAD,
    ) -> None:
        self._budget, self._ranks = max_seqlen_per_dp_cp_rank, cp_size * dp_size
        self._multiple = microbatch_group_size_per_vp_stage or 1
        self._cost, self._overhead = arguments.cost_model(cost), split_overhead

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> Groups:
        """Ids of samples as [group][rank][sample], from (id, length) of each.

        All ranks train a group together where that is sooner done, or blocks of 2^k ranks leave
        one idle. Raises SampleTooLong as `BlockScheduler` does, and UnequalPartitions where too few
        samples leave a group of the multiple without one.
        """
        ids, _, tokens, planned = _by_group(sample_id_seqlens, self._planned)
        groups = [self._soonest(group, tokens) for group in planned]
        if len(groups) % self._multiple:
            raise UnequalPartitions(
                f"{len(tokens)} samples are {len(groups)} groups, no multiple of {self._multiple}"
            )
        return [[[ids[i] for i in rank] for rank in group] for group in groups]

    def _planned(self, tokens: IntArray) -> Groups:
        """Indices as [rank][group][sample]."""
        return plan_step(
            tokens,
            dp_size=self._ranks,
            micro_batch_tokens=self._budget,
            multiple=self._multiple,
            cost=self._cost,
            max_split=self._ranks,
            split_overhead=self._overhead,
        )

    def _soonest(self, group: list[list[int]], tokens: IntArray) -> list[list[int]]:
        """In blocks without an idle rank, or in one block of all ranks."""
        busy = _all_busy(group, tokens, self._cost)
        together = [list(dict.fromkeys(chain.from_iterable(group)))] * self._ranks
        if busy is None:
            return together
        whole = round_up(tokens[together[0]], 2 * self._ranks)
        fits = whole.sum() <= self._budget * self._ranks
        sooner = self._time(together, tokens) < self._time(busy, tokens)
        return together if fits and sooner else busy

    def _time(self, group: list[list[int]], tokens: IntArray) -> float:
        """Of the slowest block of a group."""
        time = 0.0
        for own, k in Counter(map(tuple, group)).items():
            padded = round_up(tokens[list(own)], int(pieces_of(np.array(k))))
            share = float(share_of(np.array(k), self._overhead))
            time = max(time, share * float(self._cost(padded).sum()))
        return time


def _by_group(
    samples: Sequence[tuple[int, int]], plan: Callable[[IntArray], Groups]
) -> tuple[list[int], list[int], IntArray, Groups]:
    """Ids, lengths, tokens, and [group][rank] of what is planned, but groups in which all idle."""
    ids, lengths = [i for i, _ in samples], [length for _, length in samples]
    tokens = np.maximum(arguments.as_lengths(lengths), 1)
    groups = zip(*plan(tokens), strict=True) if samples else ()
    return ids, lengths, tokens, [list(group) for group in groups if any(group)]


def _all_busy(group: list[list[int]], tokens: IntArray, cost: CostModel) -> list[list[int]] | None:
    """The same with blocks doubled, the smallest first; None where a rank stays idle."""
    sizes = Counter(map(tuple, filter(None, group)))
    work = {samples: float(cost(tokens[list(samples)]).sum()) for samples in sizes}
    while (idle := len(group) - sizes.total()) > 0:
        smallest = min(sizes, key=lambda own: (sizes[own], -work[own]))
        if sizes[smallest] > idle:
            return None
        sizes[smallest] *= 2
    largest_first = sorted(sizes.items(), key=lambda item: -item[1])
    return [list(samples) for samples, size in largest_first for _ in range(size)]
