"""Claims about padded plans beside simple ways to pad the same samples, by what ranks compute."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollout_planner import Quadratic, plan, plan_step
from rollout_planner.types import (
    Grouping,
    IntArray,
    Layout,
    PlanConfig,
    Sync,
    Window,
    step_time,
)

#: Samples of each micro-batch, rank by rank.
Step = list[list[list[int]]]


def lengths_of(rng: np.random.Generator, n: int) -> IntArray:
    """Lognormal ones, a few distinct ones, some long among short, or a single long one."""
    huge = rng.integers(1, 50, n)
    huge[rng.integers(n)] = 20_000
    found = (
        rng.lognormal(6, 1.2, n),
        rng.choice([10, 37, 100, 1000], n),
        rng.integers(50, 150, n) * rng.choice([1, 1, 1, 10], n),
        huge,
    )
    return np.maximum(found[rng.integers(len(found))], 1).astype(np.int64)


def time_of(lengths: IntArray, step: Step, sync: Sync) -> float:
    x = Quadratic()(lengths)
    cost = [[len(part) * float(x[part].max(initial=0.0)) for part in rank] for rank in step]
    return step_time(np.array(cost), sync)


def evenly(ranks: list[IntArray], steps: int) -> Step:
    """Each rank's samples, in their order, as many in each micro-batch."""
    return [[part.tolist() for part in np.array_split(rank, steps)] for rank in ranks]


def ranks_of(lengths: IntArray, group: IntArray, ranks: int) -> Iterator[list[IntArray]]:
    """Groups dealt in turn as they came and by falling cost, and by LPT; samples by length."""
    load = np.bincount(group, weights=Quadratic()(lengths))
    falling, longest = np.argsort(-load, kind="stable"), np.argsort(-lengths, kind="stable")
    taken, lpt = np.zeros(ranks), np.zeros(len(load), dtype=np.int64)
    for each in falling.tolist():
        lpt[each] = taken.argmin()
        taken[lpt[each]] += load[each]
    dealt = np.empty(len(load), dtype=np.int64)
    dealt[falling] = np.arange(len(load)) % ranks
    for rank_of in (dealt, np.arange(len(load)) % ranks, lpt):
        of = rank_of[group[longest]]
        yield [longest[of == r] for r in range(ranks)]


def fits(step: Step, lengths: IntArray, limit: dict[str, Any]) -> bool:
    parts = [part for rank in step for part in rank if part]
    if "micro_batch_size" in limit:
        return max(map(len, parts)) <= int(limit["micro_batch_size"])
    return all(
        len(part) * int(lengths[part].max()) <= int(limit["micro_batch_tokens"]) for part in parts
    )


@pytest.mark.parametrize("sync", Sync)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_ranks_that_simply_share_samples_out_and_cut_them_evenly_never_take_less(
    sync: Sync, grouped: bool, counted: bool
) -> None:
    rng, compared = np.random.default_rng(25), 0
    for _ in range(120):
        n, ranks = int(rng.integers(4, 60)), int(rng.choice([2, 3, 4, 5]))
        lengths = lengths_of(rng, n)
        group = rng.integers(0, max(n // 3, 1), n) if grouped else np.arange(n)
        group = np.unique(group, return_inverse=True)[1]
        limit: dict[str, Any] = {"micro_batch_size": int(rng.choice([2, 3, 4, 8]))}
        if not counted:
            limit = {"micro_batch_tokens": int(lengths.max() * rng.choice([1, 2, 8]))}
        groups = {"groups": group.tolist()} if grouped else {}
        step = plan_step(lengths, dp_size=ranks, layout="padded", sync=sync, **limit, **groups)
        time = time_of(lengths, step, sync)
        for shared in ranks_of(lengths, group, ranks):
            plain = evenly(shared, len(step[0]))
            if all(len(part) for rank in plain for part in rank) and fits(plain, lengths, limit):
                compared += 1
                assert time <= time_of(lengths, plain, sync) * (1 + 1e-9)
    assert compared > 50


@pytest.mark.parametrize("sync", Sync)
def test_many_micro_steps_leave_one_long_sample_by_itself(sync: Sync) -> None:
    """It took up to 5 times as long where the work did not pay for any other try."""
    rng = np.random.default_rng(3)
    lengths = np.append(20_000, rng.integers(1, 50, 451))
    step = plan_step(lengths, dp_size=2, layout="padded", micro_batch_size=8, sync=sync)
    alone = time_of(lengths, [[[0]]], sync)
    assert time_of(lengths, step, sync) < 2.5 * alone


@pytest.mark.parametrize("sync", Sync)
def test_whole_groups_never_take_longer_than_by_first_fit(sync: Sync) -> None:
    rng, compared = np.random.default_rng(8), 0
    for _ in range(120):
        ranks, most = int(rng.integers(1, 4)), int(rng.integers(3, 9))
        size = rng.integers(1, most + 1, int(rng.integers(6, 24)))
        lengths, group = lengths_of(rng, int(size.sum())), np.repeat(np.arange(len(size)), size)
        step = plan_step(
            lengths,
            dp_size=ranks,
            layout="padded",
            micro_batch_size=most,
            sync=sync,
            groups=group.tolist(),
            grouping="micro-batch",
        )
        longest = np.array([lengths[group == g].max() for g in range(len(size))])
        parts = first_fit(np.argsort(-longest, kind="stable"), size, most)
        if len(parts) != ranks * len(step[0]):
            continue  # a plan has no fillers, and more micro-batches where that takes less time
        compared += 1
        plain = dealt([np.flatnonzero(np.isin(group, part)) for part in parts], lengths, step)
        assert time_of(lengths, step, sync) <= time_of(lengths, plain, sync) * (1 + 1e-9)
    assert compared > 15


def test_a_count_that_nobody_fills_takes_no_room() -> None:
    """Of a step of a number of groups, any count is allowed."""
    group, none = np.array([0, 0, 0, 1, 1, 2]), np.zeros(6, dtype=np.int64)
    window = Window(np.array([5, 9, 100, 7, 3, 50]), none, group, none > 0)
    config = PlanConfig(
        dp_size=2,
        dispatch_batch_size=6,
        cost=Quadratic(),
        by_groups=True,
        micro_batch_size=2**62,
        layout=Layout.PADDED,
        grouping=Grouping.MICRO_BATCH,
    )
    assert plan(window, config, take=3).counts.sum() == 6


def first_fit(order: IntArray, size: IntArray, most: int) -> list[list[int]]:
    parts: list[list[int]] = []
    for each in order.tolist():
        into = next((part for part in parts if size[part].sum() + size[each] <= most), None)
        if into is None:
            parts.append(into := [])
        into.append(each)
    return parts


def dealt(parts: list[IntArray], lengths: IntArray, like: Step) -> Step:
    """Micro-batches by falling cost, each micro-step's dearest to the rank that has least."""
    x = Quadratic()(lengths)
    cost = np.array([len(part) * x[part].max() for part in parts])
    found: Step = [[] for _ in like]
    held = np.zeros(len(like))
    for first in range(0, len(like) * len(like[0]), len(like)):
        column = np.argsort(-cost, kind="stable")[first : first + len(like)]
        for part, rank in zip(column.tolist(), np.argsort(held, kind="stable"), strict=False):
            found[int(rank)].append(parts[part].tolist())
            held[rank] += cost[part]
    return [rank + [[]] * (len(like[0]) - len(rank)) for rank in found]
