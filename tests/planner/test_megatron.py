"""Blocks as Megatron-Core asks for them: every plan that it gets can be trained as it is."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_planner import BlockScheduler, PackedBlockScheduler, UnequalPartitions
from rollout_planner.errors import SampleTooLong


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process group of so many."""

    count: int

    def size(self) -> int:
        return self.count


LENGTHS = st.lists(st.integers(1, 4000), min_size=1, max_size=40)


@given(LENGTHS, st.sampled_from((1, 2, 4, 8, 16)), st.sampled_from((500, 1000, 4000)))
@example([100], 16, 500)
@example([4000, 1, 1], 8, 1000)
def test_blocks_are_aligned_large_enough_and_leave_no_rank_idle(
    lengths: list[int], ranks: int, longest: int
) -> None:
    samples = [(7 * at, min(length, longest * ranks)) for at, length in enumerate(lengths)]
    sizes = dict(samples)
    tokens, groups = BlockScheduler(longest, Ranks(ranks)).get_groups_and_subsamples(samples)
    for own, size in blocks(groups, ranks, sizes):
        assert all(sizes[sample] <= longest * size for sample in own)
    assert tokens == [[[sizes[sample] for sample in rank] for rank in group] for group in groups]


@given(LENGTHS, st.sampled_from((1, 2, 4, 8, 16)), st.sampled_from((500, 1000, 4000)))
@example([100], 16, 500)
@example([4000, 1, 1], 8, 1000)
def test_packed_blocks_keep_to_their_budget(lengths: list[int], ranks: int, budget: int) -> None:
    # In whole pieces, as a split sample is padded to them.
    most = budget * ranks // (2 * ranks) * (2 * ranks)
    samples = [(7 * at, min(length, most)) for at, length in enumerate(lengths)]
    sizes = dict(samples)
    groups = PackedBlockScheduler(budget, 1, ranks).get_groups_and_subsamples(samples)
    for own, size in blocks(groups, ranks, sizes):
        assert sum(sizes[sample] for sample in own) <= budget * size


def test_no_sample_is_on_fewer_ranks_than_hold_it_where_ranks_are_no_power_of_two() -> None:
    """The fourth of 900 was on one rank, beside a block of four that had three of them."""
    samples = list(enumerate([900, 900, 900, 900, 100]))
    _, [group] = BlockScheduler(500, Ranks(6)).get_groups_and_subsamples(samples)
    assert all(sum(sample in rank for rank in group) >= 2 for sample in range(4))


def test_a_packed_group_is_of_all_ranks_where_blocks_would_leave_one_idle() -> None:
    """Megatron-Core and verl take such a group, whatever the number of ranks."""
    groups = PackedBlockScheduler(1000, 2, 3).get_groups_and_subsamples([(7, 300)])
    assert groups == [[[7]] * 6]


@pytest.mark.parametrize(
    ("overhead", "group"), [(0.0, [[0, 1, 2], [0, 1, 2]]), (0.2, [[0], [1, 2]])]
)
def test_a_packed_group_is_of_all_ranks_where_that_is_sooner_done(
    overhead: float, group: list[list[int]]
) -> None:
    """Of work of 116 it takes 58 on both, 64 on one each, 70 on both if that costs 20 %."""
    scheduler = PackedBlockScheduler(1000, 2, 1, cost="quadratic:1,0,0", split_overhead=overhead)
    assert scheduler.get_groups_and_subsamples([(0, 800), (1, 600), (2, 400)]) == [group]


def test_no_packed_group_is_empty() -> None:
    """The planner begins a fifth micro-step here, in which no rank has a sample."""
    lengths = [
        1064, 840, 840, 512, 696, 3416, 520, 40, 136, 312, 14224, 488, 760, 128, 176, 10544
    ]  # fmt: skip
    scheduler = PackedBlockScheduler(4096, 1, 4, cost="quadratic:1,0,0", split_overhead=0.0)
    groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
    assert blocks(groups, 4, dict(enumerate(lengths)))


def test_the_number_of_packed_groups_suits_a_virtual_pipeline() -> None:
    samples = list(enumerate([300] * 40))
    groups = PackedBlockScheduler(1000, 2, 2, 3).get_groups_and_subsamples(samples)
    assert len(groups) % 3 == 0
    assert sorted({i for group in groups for rank in group for i in rank}) == list(range(40))


def blocks(
    groups: list[list[list[int]]], ranks: int, sizes: dict[int, int]
) -> list[tuple[list[int], int]]:
    """Samples and ranks of each block; they are aligned, no rank is idle, each sample is in one."""
    found: list[tuple[list[int], int]] = []
    for group in groups:
        assert len(group) == ranks
        at = 0
        while at < ranks:
            own = group[at]
            size = sum(1 for rank in group if rank == own)
            assert own
            assert (at % size, size & (size - 1)) == (0, 0)
            assert group[at : at + size] == [own] * size
            found.append((own, size))
            at += size
    assert sorted(sample for own, _ in found for sample in own) == sorted(sizes)
    return found


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SampleTooLong, match="budget of 2000 tokens; raise max_seq_len_per_rank"):
        BlockScheduler(500, Ranks(4)).get_groups_and_subsamples([(0, 2001)])
    with pytest.raises(UnequalPartitions, match="1 samples cannot keep 6 ranks busy"):
        BlockScheduler(500, Ranks(6)).get_groups_and_subsamples([(0, 100)])
    assert BlockScheduler(500, Ranks(4)).get_groups_and_subsamples([]) == ([], [])
    with pytest.raises(UnequalPartitions, match="1 samples are 1 groups, no multiple of 3"):
        PackedBlockScheduler(1000, 1, 2, 3).get_groups_and_subsamples([(0, 100)])


def test_numbers_may_be_arrays_own() -> None:
    samples = list(zip(np.arange(4).tolist(), np.array([5, 6, 7, 8]), strict=True))
    _, groups = BlockScheduler(10, Ranks(2)).get_groups_and_subsamples(samples)
    assert sorted(sample for rank in groups[0] for sample in rank) == [0, 1, 2, 3]
