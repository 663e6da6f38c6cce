"""Claims about plan_step: the dispatcher's own planner, for lengths that are all at hand."""

import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import SampleTooLong, UnequalPartitions
from rollout_planner import Quadratic, plan, plan_step, tokens
from rollout_planner.errors import too_many_fillers
from rollout_planner.types import PlanConfig, Sync, Window, straggler_excess

LENGTHS = st.lists(st.integers(0, 100), min_size=1, max_size=60)
LIMITS = st.one_of(
    st.builds(lambda size: {"micro_batch_size": size}, st.integers(1, 5)),
    st.builds(lambda budget: {"micro_batch_tokens": budget}, st.integers(100, 400)),
)


COUNTS = st.builds(
    lambda multiple, minimum: {"multiple": multiple, "minimum": minimum},
    st.integers(1, 3),
    st.integers(1, 5),
)


@given(LENGTHS, st.integers(1, 6), LIMITS, COUNTS, st.sampled_from(Sync))
def test_every_rank_has_as_many_micro_batches_and_every_index_is_in_one(
    lengths: list[int], dp_size: int, limit: dict[str, Any], counts: dict[str, Any], sync: Sync
) -> None:
    ranks = plan_step(lengths, dp_size=dp_size, sync=sync, **limit, **counts)
    assert len(ranks) == dp_size
    (count,) = {len(rank) for rank in ranks}
    assert count >= counts["minimum"]
    assert count % counts["multiple"] == 0
    parts = [part for rank in ranks for part in rank]
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert sum(1 for part in parts if part) == min(len(parts), len(lengths))
    assert all(len(part) <= limit.get("micro_batch_size", len(part)) for part in parts)
    budget = limit.get("micro_batch_tokens")
    assert all(budget is None or sum(lengths[i] for i in part) <= budget for part in parts)


def test_it_plans_as_the_dispatcher_does() -> None:
    lengths = np.clip(np.random.default_rng(5).lognormal(8, 1, 256), 1, 40_000).astype(np.int64)
    nothing = np.zeros(256, dtype=np.int64)
    window = Window(lengths, nothing, nothing - 1, nothing.astype(bool))
    config = PlanConfig(16, 256, Quadratic(), micro_batch_tokens=80_000)
    expected = [[part.tolist() for part in rank] for rank in plan(window, config).micro_batches]
    assert plan_step(lengths, dp_size=16, micro_batch_tokens=80_000) == expected


@pytest.mark.parametrize("sync", list(Sync))
def test_ranks_hardly_wait(sync: Sync) -> None:
    lengths = np.clip(np.random.default_rng(5).lognormal(8, 1, 512), 1, 40_000).astype(np.int64)
    ranks = plan_step(lengths, dp_size=8, micro_batch_tokens=120_000, sync=sync)
    cost = np.array([[Quadratic()(lengths[part]).sum() for part in rank] for rank in ranks])
    assert straggler_excess(cost, sync) < 0.01


def test_groups_share_a_rank() -> None:
    names = ["a", "b", "c", "d"] * 4
    ranks = plan_step([5] * 16, dp_size=2, micro_batch_size=2, groups=names)
    held = [{names[i] for part in rank for i in part} for rank in ranks]
    assert not held[0] & held[1]
    assert all(part for rank in ranks for part in rank)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, np.int32])
def test_names_of_groups_may_be_tensors_and_arrays_of_one_number(kind: Any) -> None:
    names = [0, 1, 2, 3] * 4
    options: dict[str, Any] = {"dp_size": 2, "micro_batch_size": 2}
    of_kind = [kind(name) for name in names]
    assert plan_step([5] * 16, groups=of_kind, **options) == plan_step(
        [5] * 16, groups=names, **options
    )


def test_with_fewer_samples_than_micro_batches_the_rest_are_fillers() -> None:
    assert plan_step([7, 5, 6], dp_size=4, micro_batch_size=2) == [[[0]], [[2]], [[1]], [[]]]


def test_a_micro_batch_size_beyond_all_samples_takes_no_more_room() -> None:
    lengths = list(range(1, 9))
    most = plan_step(lengths, dp_size=2, micro_batch_size=8)
    assert plan_step(lengths, dp_size=2, micro_batch_size=10**12) == most


@pytest.mark.parametrize(
    "options", [{}, {"sync": "step"}, {"layout": "padded"}, {"minimum": 4}], ids=str
)
def test_a_micro_batch_that_may_hold_all_samples_takes_memory_for_what_there_is(
    options: dict[str, Any],
) -> None:
    lengths = np.random.default_rng(0).integers(1, 30_000, 4096)

    def peak(size: int) -> int:
        plan_step(lengths, dp_size=64, micro_batch_size=size, **options)
        tracemalloc.start()
        plan_step(lengths, dp_size=64, micro_batch_size=size, **options)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(4096) < 3 * peak(128)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_so_does_one_that_may_hold_all_whole_groups_of_a_rank(layout: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 30_000, 2048)
    groups = (np.arange(2048) // 4).tolist()

    def peak(size: int) -> int:
        tracemalloc.start()
        plan_step(
            lengths,
            dp_size=64,
            micro_batch_size=size,
            minimum=4,
            groups=groups,
            layout=layout,
            sync="step",
        )
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(2048) < 1.5 * peak(64)


def test_it_takes_as_many_as_are_cheap_while_the_dearest_are_by_themselves() -> None:
    lengths = [40_000] * 14 + [100] * 1986
    ranks = plan_step(lengths, dp_size=16, micro_batch_size=2000)
    dearest = max(Quadratic()(np.array(lengths)[part]).sum() for [part] in ranks)
    assert dearest == Quadratic()(np.array([40_000]))[0]


def test_padding_to_a_multiple_counts_in_the_budget() -> None:
    assert len(plan_step([5] * 8, dp_size=2, micro_batch_tokens=20)[0]) == 1
    assert len(plan_step([5] * 8, dp_size=2, micro_batch_tokens=20, pad_to=8)[0]) == 2


def test_what_is_above_the_budget_is_an_error_or_goes_alone() -> None:
    with pytest.raises(SampleTooLong, match="it is number 1: raise the budget"):
        plan_step([3, 15, 3], dp_size=1, micro_batch_tokens=10)
    ranks = plan_step([3, 15, 3], dp_size=1, micro_batch_tokens=10, oversize="alone")
    assert sorted(map(len, ranks[0])) == [1, 2]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_lists_arrays_and_tensors_are_planned_alike(make: Any) -> None:
    found = plan_step(make([8, 7, 6, 5, 4, 3]), dp_size=2, micro_batch_tokens=10, cost=tokens)
    assert found == plan_step([8, 7, 6, 5, 4, 3], dp_size=2, micro_batch_tokens=10, cost="tokens")


@pytest.mark.parametrize("limit", [{"micro_batch_size": 2}, {"micro_batch_tokens": 17_000}])
@pytest.mark.parametrize("give", [list, torch.tensor, np.array])
def test_a_cost_may_be_whole_numbers_in_a_list_an_array_or_a_tensor(give: Any, limit: Any) -> None:
    lengths = [9000, 120, 300, 8000, 450, 130, 7000, 200]
    for sync in Sync:
        found = plan_step(lengths, dp_size=2, sync=sync, cost=lambda s: give(s * s), **limit)
        squares = Quadratic(1.0, 0.0, 0.0)
        assert found == plan_step(lengths, dp_size=2, sync=sync, cost=squares, **limit)


@pytest.mark.parametrize("options", [{"minimum": 2}, {"groups": "aabbccdd"}, {"layout": "padded"}])
@pytest.mark.parametrize("sync", list(Sync))
def test_a_budget_that_nobody_can_fill_is_none(options: dict[str, Any], sync: Sync) -> None:
    lengths = [9000, 120, 300, 8000, 450, 130, 7000, 200]
    options = {"dp_size": 2, "sync": sync, **options}
    found = plan_step(lengths, micro_batch_tokens=sys.maxsize, **options)
    assert found == plan_step(lengths, micro_batch_tokens=10**9, **options)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("sync", list(Sync))
@pytest.mark.parametrize("budget", [10_000, sys.maxsize])
def test_the_dearest_costs_there_may_be_are_planned_as_others_are(
    layout: str, sync: Sync, budget: int
) -> None:
    lengths = [9000, 120, 300, 8000, 450, 130, 7000, 200]
    limits: dict[str, Any] = {
        "dp_size": 2,
        "sync": sync,
        "layout": layout,
        "micro_batch_tokens": budget,
    }
    found = plan_step(lengths, cost=Quadratic(0.0, 2.0**900), **limits)
    assert found == plan_step(lengths, cost=Quadratic(0.0, 1.0), **limits)
    with pytest.raises(ValueError, match=r"costs must be at most 1e\+280, and number 0 is 9"):
        plan_step(lengths, cost=Quadratic(0.0, 1e300), **limits)


VALID: dict[str, Any] = {"lengths": [3], "dp_size": 2, "micro_batch_tokens": 10}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": []}, "no lengths, so there is no step"),
        ({"lengths": [1.5]}, "must be whole numbers"),
        ({"lengths": [float("nan")]}, "must be finite, and number 0 is nan"),
        ({"lengths": [float("inf")]}, "must be finite, and number 0 is inf"),
        ({"lengths": [3, -1]}, "must not be negative, and number 1 is -1"),
        ({"dp_size": 0}, "dp_size is 0; it must be at least 1"),
        ({"micro_batch_tokens": None}, "neither is set"),
        ({"micro_batch_size": 2}, "both are set"),
        ({"dp_size": None}, "dp_size is None; it must be a whole number"),
        ({"dp_size": 2.0}, "dp_size is 2.0; it must be a whole number"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens is 0; it must be at least 1"),
        ({"micro_batch_tokens": 1e4}, "micro_batch_tokens is 10000.0; it must be a whole number"),
        ({"micro_batch_tokens": 10**30}, "it must be at most"),
        ({"micro_batch_tokens": None, "micro_batch_size": -1}, "micro_batch_size is -1"),
        ({"groups": 5}, "groups must be one hashable name"),
        ({"groups": [torch.tensor([1, 2])]}, "groups must be one hashable name a sample"),
        ({"groups": [np.array([1, 2])]}, "groups must be one hashable name a sample"),
        (
            {"lengths": [6, 6], "groups": ["a", "a"], "grouping": "micro-batch"},
            r"a group of 2 samples has 12 tokens.* number 0: raise the budget, or pass oversize",
        ),
        ({"sync": "never"}, "sync is 'never'; use 'step' or 'micro-step'"),
        (
            {"lengths": [6, 6], "groups": ["a", "a"], "grouping": "micro-batch"}
            | {"micro_batch_tokens": None, "micro_batch_size": 1},
            "a group has 2 samples and micro_batch_size is 1; raise it",
        ),
        ({"groups": ["a"], "grouping": "step"}, "grouping is 'step'; use 'rank' or 'micro-batch'"),
        ({"groups": ["a", "b"]}, "2 groups for 1 lengths"),
        ({"cost": lambda counts: counts * float("nan")}, "costs must be finite"),
        ({"cost": lambda counts: counts * -1.0}, "costs must not be negative"),
        ({"cost": lambda counts: counts * 0.0}, "the cost model gives 0 for each of 1 samples"),
        ({"cost": "quadratic:0,0,0"}, "every sample costs 0"),
        ({"cost": lambda counts: np.append(counts, 2.0)}, "gave 2 costs for 1 samples"),
        ({"pad_to": 16}, "a sample of 16 tokens exceeds the micro-batch budget of 10"),
        ({"pad_to": 2**60}, "pad_to is 1152921504606846976; it must be at most"),
        ({"minimum": 0}, "minimum is 0"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_step(**VALID | options)


def test_counts_may_be_what_counts_as_whole_numbers() -> None:
    plain = plan_step([5, 4, 3, 2, 1], dp_size=2, micro_batch_tokens=8, multiple=2)
    kinds: tuple[Any, ...] = (torch.tensor, np.array, np.int32)
    for of in kinds:
        found = plan_step(
            [5, 4, 3, 2, 1], dp_size=of(2), micro_batch_tokens=of(8), multiple=of(2), pad_to=of(1)
        )
        assert found == plain
    assert plan_step([1, 2], dp_size=True, micro_batch_tokens=8) == [[[1, 0]]]


@pytest.mark.parametrize(
    ("asked", "micro_batches"),
    [
        ({"minimum": 10**6}, 2 * 10**6),
        ({"multiple": 10**12}, 2 * 10**12),
        ({"dp_size": 10**9}, 10**9),
    ],
)
def test_far_more_micro_batches_than_samples_are_refused(
    asked: dict[str, Any], micro_batches: int
) -> None:
    asked_by = "dp_size, minimum and multiple"
    said = too_many_fillers(micro_batches, 3, asked_by)
    with pytest.raises(UnequalPartitions, match=f"^{said}$"):
        plan_step([5, 4, 3], **{"dp_size": 2, "micro_batch_tokens": 8, **asked})


def test_some_more_micro_batches_than_samples_are_fillers() -> None:
    parts = plan_step([5, 4, 3], dp_size=2, micro_batch_tokens=8, minimum=4)
    assert [len(rank) for rank in parts] == [4, 4]
    assert sorted(index for rank in parts for part in rank for index in part) == [0, 1, 2]
