"""Giants over several ranks: legal, and never longer than without."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_planner import UnequalPartitions, plan_step, tokens
from rollout_planner.errors import SampleTooLong
from rollout_planner.planner import plan, plan_digest
from rollout_planner.types import IntArray, MicroBatchOrder, Plan, PlanConfig, Sync, Window
from tests.support.blocks import COST, OVERHEAD, step_time

LENGTHS = st.lists(
    st.one_of(st.integers(1, 100), st.integers(1000, 4000)), min_size=1, max_size=40
).map(np.array)


@given(
    LENGTHS, st.integers(1, 12), st.sampled_from((2, 4, 8)), st.sampled_from(("step", "micro-step"))
)
@example(np.array([1000, 900, 1, 1]), 8, 4, "step")
def test_a_plan_with_blocks_is_legal_and_never_longer(
    lengths: IntArray, ranks: int, max_split: int, sync: str
) -> None:
    def time(split: int) -> float:
        found = plan_step(
            lengths, dp_size=ranks, micro_batch_tokens=4000, sync=sync, max_split=split,
            split_overhead=OVERHEAD,
        )  # fmt: skip
        begin = 0.04 * 4000 * float(COST(lengths).sum()) / float(lengths.sum())
        return step_time(found, lengths, sync, 4000) + begin * len(found[0])

    assert time(max_split) <= time(1) * (1 + 1e-9)


def test_a_giant_goes_to_several_ranks_and_what_is_left_beside_it() -> None:
    found = plan_step(
        [1600, 300, 300, 200], dp_size=4, micro_batch_tokens=2000, cost=tokens, max_split=2,
        split_overhead=0.0,
    )  # fmt: skip
    assert found in ([[[0]], [[0]], [[1]], [[2, 3]]], [[[0]], [[0]], [[1, 3]], [[2]]])


def test_a_sample_beyond_the_budget_of_one_rank_is_split() -> None:
    found = plan_step([900, 100, 100], dp_size=2, micro_batch_tokens=500, max_split=2)
    assert step_time(found, np.array([900, 100, 100]), "micro-step", 500) > 0
    with pytest.raises(SampleTooLong, match="budget of 1000 tokens"):
        plan_step([1100], dp_size=2, micro_batch_tokens=500, max_split=8)


def test_samples_that_leave_half_of_their_blocks_empty_have_room() -> None:
    lengths = np.full(50, 1100)
    found = plan_step(lengths, dp_size=2, micro_batch_tokens=1000, max_split=2)
    assert step_time(found, lengths, "micro-step", 1000) > 0


def test_without_splitting_it_is_the_plan_without_all_this() -> None:
    lengths = np.random.default_rng(1).integers(1, 4000, 200)
    without = plan_step(lengths, dp_size=8, micro_batch_tokens=4096)
    assert plan_step(lengths, dp_size=8, micro_batch_tokens=4096, max_split=1) == without


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"groups": [1, 1]}, "max_split 2 .* there is groups rank, which it cannot heed"),
        ({"equal_counts": True}, "equal_counts is for packed samples, without groups or max_split"),
        ({"layout": "padded"}, "max_split 2 .* there is layout padded, which it cannot heed"),
    ],
    ids=["groups", "equal counts", "padded"],
)
def test_only_packed_samples_of_their_own_are_split(more: dict[str, object], words: str) -> None:
    with pytest.raises(UnequalPartitions, match=words):
        plan_step([1, 2], dp_size=2, micro_batch_tokens=10, max_split=2, **more)  # type: ignore[arg-type]
    with pytest.raises(UnequalPartitions, match="under micro_batch_tokens"):
        plan_step([1, 2], dp_size=2, micro_batch_size=1, max_split=2)


@pytest.mark.parametrize("overhead", [-0.1, float("nan"), 2.0])
def test_an_overhead_that_cannot_be_is_refused(overhead: float) -> None:
    with pytest.raises(UnequalPartitions, match="split_overhead"):
        plan_step([1, 2], dp_size=2, micro_batch_tokens=10, max_split=2, split_overhead=overhead)


@given(LENGTHS, st.integers(2, 12), st.sampled_from((2, 4, 8)), st.integers(0, 3))
def test_the_dispatchers_plan_with_blocks_is_legal_and_has_each_sample_once(
    lengths: IntArray, ranks: int, max_split: int, giants: int
) -> None:
    most = 1 << (min(ranks, max_split).bit_length() - 1)
    lengths = np.append(lengths, np.full(giants, 4000 * most - 7))
    n = len(lengths)
    none = np.zeros(n, dtype=np.int64)
    config = PlanConfig(ranks, n, COST, micro_batch_tokens=4000, max_split=most)
    found = plan(Window(lengths, none, none - 1, none.astype(bool)), config)
    assert sorted(found.chosen.tolist()) == list(range(n))
    parts = [[part.tolist() for part in rank] for rank in found.micro_batches]
    if found.cp_sizes is not None:
        for (rank, step), size in np.ndenumerate(found.cp_sizes):
            assert (found.cp_sizes[rank - rank % size :][:size, step] == size).all()
            assert not parts[rank][step] or rank % size == 0
        parts = [
            [parts[rank - rank % size][step] for step, size in enumerate(sizes)]
            for rank, sizes in enumerate(found.cp_sizes.tolist())
        ]
    assert step_time(parts, lengths, "micro-step", 4000) <= found.time * (1 + 1e-9)


def test_micro_steps_with_blocks_come_in_the_order_that_is_asked_for() -> None:
    lengths = np.append(np.random.default_rng(1).integers(1, 3000, 90), [16000, 7000, 5000])
    none = np.zeros(len(lengths), dtype=np.int64)
    window = Window(lengths, none, none - 1, none.astype(bool))

    def planned(order: MicroBatchOrder, sync: Sync = Sync.MICRO_STEP) -> Plan:
        found = plan(window, PlanConfig(
            4, len(lengths), tokens, micro_batch_tokens=4096, max_split=4, sync=sync,
            micro_batch_order=order,
        ))  # fmt: skip
        assert found.cp_sizes is not None
        assert found.num_micro_batches > 4
        return found

    def micro_steps(made: Plan) -> list[list[int]]:
        return [
            sorted(i for part in column for i in part.tolist())
            for column in zip(*made.micro_batches, strict=True)
        ]

    as_planned = planned(MicroBatchOrder.AS_PLANNED)
    peak_first = planned(MicroBatchOrder.PEAK_FIRST)
    ends_small = planned(MicroBatchOrder.ENDS_SMALL)
    for other in (peak_first, ends_small):
        assert sorted(micro_steps(other)) == sorted(micro_steps(as_planned))
        assert other.time == pytest.approx(as_planned.time)
    # Of a rank of a block: a tenth more for two doublings, a quarter of the tokens.
    most = peak_first.cost.max(axis=0)
    assert (np.diff(most) <= 0.11 * most[:-1]).all()
    most = ends_small.cost.max(axis=0)
    peak = int(most.argmax())
    assert 0 < peak < len(most) - 1
    assert (np.diff(most)[:peak] >= 0).all()
    assert (np.diff(most)[peak:] <= 0).all()
    in_step = [planned(order, Sync.STEP) for order in MicroBatchOrder]
    assert len({plan_digest(made) for made in in_step}) == 1


def test_the_oldest_samples_are_taken_where_they_may_be_split() -> None:
    lengths = np.random.default_rng(1).integers(1, 4000, 24)
    none = np.zeros(24, dtype=np.int64)
    config = PlanConfig(4, 16, COST, micro_batch_tokens=4096, max_split=4)
    found = plan(Window(lengths, none, none - 1, none.astype(bool)), config)
    assert sorted(found.chosen.tolist()) == list(range(16))
