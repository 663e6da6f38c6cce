"""Claims about plans beside plain methods on the same samples, whatever stays together.

A window of the batch itself: no selection helps, so a plan has to be at least as good by its split.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from rollout_planner import Quadratic, plan, plan_step, tokens, tuning
from rollout_planner.objective import bound_of
from rollout_planner.order import by_falling_tokens, group_index
from rollout_planner.selection import choose
from rollout_planner.split.groups import group_items
from rollout_planner.split.parts import Batch
from rollout_planner.types import (
    FloatArray,
    Grouping,
    IntArray,
    Layout,
    Plan,
    PlanConfig,
    Strategy,
    Sync,
    Window,
    step_time,
)

PLAIN = (Strategy.ROUND_ROBIN, Strategy.GREEDY, Strategy.KK)
WHOLE = (Grouping.IGNORE, Grouping.RANK, Grouping.MICRO_BATCH)
KINDS = [
    (layout, counted, grouping, sync)
    for layout, counted, grouping, sync in product(Layout, (True, False), WHOLE, Sync)
    if counted or layout is Layout.PACKED or grouping is not Grouping.MICRO_BATCH
]


def lengths_of(rng: np.random.Generator, n: int) -> IntArray:
    """Lognormal ones, small whole ones, or a few long among short."""
    found = (
        rng.lognormal(6.5, rng.choice([0.3, 1.2]), n),
        rng.integers(1, rng.choice([8, 50]), n),
        np.where(rng.random(n) < 0.1, rng.integers(4000, 9000, n), rng.integers(100, 900, n)),
    )[rng.integers(3)]
    return np.clip(found, 1, 16_000).astype(np.int64)


def groups_of(rng: np.random.Generator, n: int) -> IntArray:
    """Of one size, of any size, or with samples between them that are in none."""
    if rng.random() < 0.4:
        return np.arange(n) // int(rng.choice([2, 4, 8]))
    group = np.repeat(np.arange(n), rng.integers(1, 7, n))[:n]
    group[rng.random(n) < rng.choice([0, 0.3])] = -1
    return group


def case(
    rng: np.random.Generator, layout: Layout, counted: bool, grouping: Grouping, sync: Sync
) -> tuple[Window, PlanConfig]:
    n, ranks = int(rng.integers(2, 80)), int(rng.choice([1, 2, 3, 4, 8]))
    lengths, group = lengths_of(rng, n), np.full(n, -1)
    if grouping is not Grouping.IGNORE:
        group = groups_of(rng, n)
    index = group_index(group)
    piece = index if grouping is Grouping.MICRO_BATCH else np.arange(n)
    size, held = np.bincount(piece), np.bincount(piece, weights=lengths)
    config = PlanConfig(
        dp_size=ranks,
        dispatch_batch_size=n,
        cost=Quadratic() if rng.random() < 0.5 else tokens,
        layout=layout,
        sync=sync,
        grouping=grouping,
        micro_batch_size=max(int(rng.choice([1, 2, 3, 4, 8])), int(size.max())),
    )
    if not counted:
        budget = max(held.max() * rng.uniform(1, 3), lengths.sum() / ranks / rng.uniform(1, 6))
        config = replace(config, micro_batch_size=None, micro_batch_tokens=int(budget))
    none = np.zeros(n, dtype=np.int64)
    return Window(lengths, none, group, none > 0), config


def fillers(step: Plan) -> int:
    return sum(not len(part) for rank in step.micro_batches for part in rank)


@pytest.mark.parametrize(("layout", "counted", "grouping", "sync"), KINDS)
def test_no_plain_method_waits_less_on_the_same_samples_with_as_few_micro_batches(
    layout: Layout, counted: bool, grouping: Grouping, sync: Sync
) -> None:
    rng = np.random.default_rng(14)
    for _ in range(25):
        window, config = case(rng, layout, counted, grouping, sync)
        ours = plan(window, config)
        if ours.excess <= config.compared_above:
            continue
        for strategy in PLAIN:
            other = plan(window, replace(config, strategy=strategy))
            if fillers(other) > fillers(ours):
                continue  # a plan has none that another sample of the rank could fill
            if other.num_micro_batches <= ours.num_micro_batches:
                begun = begin_cost(window, config)
                theirs = other.time + begun * other.num_micro_batches
                assert ours.time + begun * ours.num_micro_batches <= theirs * (1 + 1e-9)


def begin_cost(window: Window, config: PlanConfig) -> float:
    """What a micro-step more has to save, where padding decides how many there are."""
    budget = float(config.micro_batch_tokens or 0) if config.pads_to_budget else 0.0
    work = float(config.cost(window.tokens).sum())
    return tuning.BEGIN_MICRO_STEP * budget * work / float(window.tokens.sum())


def as_groups(cost: list[list[int]]) -> tuple[IntArray, IntArray]:
    """Tokens of the samples of each group, and the groups of the samples."""
    lengths = np.array([length for group in cost for length in group])
    return lengths, np.repeat(np.arange(len(cost)), [len(group) for group in cost])


def squared(lengths: IntArray) -> FloatArray:
    return lengths.astype(np.float64) ** 2


def test_a_bound_of_groups_in_a_micro_batch_knows_that_cost_does_not_fall_with_their_tokens() -> (
    None
):
    """Sorted by tokens the dear ones come second and third, as if they had to share a rank."""
    lengths, group = as_groups([[10] * 10, [60], [50]])
    config = PlanConfig(
        dp_size=2,
        dispatch_batch_size=12,
        cost=squared,
        grouping=Grouping.MICRO_BATCH,
        micro_batch_tokens=200,
        sync=Sync.STEP,
    )
    items, own = group_items(Batch.of(squared(lengths), lengths, group), group, config)
    assert bound_of(items, 1, own) == 3600  # beside 2500 + 1000


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("sync", Sync)
def test_what_groups_of_a_micro_batch_are_thought_to_wait_is_about_what_they_wait(
    layout: Layout, sync: Sync
) -> None:
    rng, errors = np.random.default_rng(3), []
    for _ in range(60):
        window, config = case(rng, layout, True, Grouping.MICRO_BATCH, sync)
        window = replace(window, group=np.sort(np.maximum(window.group, 0)))
        n, index = len(window), group_index(window.group)
        config = replace(config, micro_batch_size=int(np.bincount(index).max()) + 2)
        last = int(np.count_nonzero(index == index.max()))
        if n - last < 8 or np.ptp(np.bincount(index)) == 0:
            continue
        cost = np.asarray(config.cost(window.tokens))
        by_cost = by_falling_tokens(window.tokens)
        first = next(choose(window, cost, config, n - last, by_cost=by_cost, ahead=True))
        kept = np.flatnonzero(first.keep)
        ours = plan(only(window, kept), config, take=len(kept))
        load = ours.cost.sum() if layout is Layout.PACKED else padded_load(cost[kept], index[kept])
        thought = (first.total - first.later) * len(kept) * cost.mean() + load
        errors.append(abs(thought / (ours.time * config.dp_size) - 1))
    assert len(errors) > 20
    assert np.mean(errors) < (0.05 if layout is Layout.PACKED else 0.2)


def only(window: Window, kept: IntArray) -> Window:
    return Window(window.tokens[kept], window.skips[kept], window.group[kept], window.must_go[kept])


def padded_load(cost: FloatArray, index: IntArray) -> float:
    """What groups cost that are padded to the longest of each."""
    return sum(float(cost[index == g].max()) * int((index == g).sum()) for g in np.unique(index))


def test_padded_micro_batches_with_room_to_spare_hold_few_long_samples() -> None:
    lengths = [9, 9, *[3] * 7]
    ranks = plan_step(lengths, dp_size=2, micro_batch_size=8, layout="padded", cost="tokens")
    assert sorted(ranks) == [[[0, 1]], [[2, 3, 4, 5, 6, 7, 8]]]


def test_padded_groups_of_like_lengths_share_a_micro_batch_whatever_their_sizes() -> None:
    """24 and 4 pad nothing; 16 and a 8 beside two of 2 take 40."""
    lengths, groups = as_groups([[8, 8], [2], [8], [2]])
    ranks = plan_step(
        lengths,
        dp_size=1,
        micro_batch_size=3,
        layout="padded",
        cost="tokens",
        groups=groups,
        grouping="micro-batch",
    )
    assert sorted(sorted(part) for rank in ranks for part in rank) == [[0, 1, 3], [2, 4]]


@pytest.mark.parametrize("sync", Sync)
def test_padded_whole_groups_wait_hardly_longer_than_by_next_fit(sync: Sync) -> None:
    """Groups by falling tokens, micro-batches by falling cost: it took up to 1.8 times less."""
    rng, compared = np.random.default_rng(41), 0
    for _ in range(80):
        ranks, most = int(rng.integers(2, 5)), int(rng.integers(4, 8))
        sizes = rng.integers(1, most + 1, int(rng.integers(8, 24)))
        longest = np.rint(rng.lognormal(6, 1.2, len(sizes)) + 1).astype(np.int64)
        lengths, groups = as_groups(
            [[int(x)] * int(k) for x, k in zip(longest, sizes, strict=True)]
        )
        step = plan_step(
            lengths,
            dp_size=ranks,
            micro_batch_size=most,
            layout="padded",
            sync=sync,
            cost=squared,
            groups=groups,
            grouping="micro-batch",
        )
        order = np.argsort(-longest * sizes, kind="stable")
        items = Items(squared(longest)[order], sizes[order], most)
        place = next_places(items, ranks, len(step[0]))
        if place is None:
            continue
        compared += 1
        loads = [[squared(lengths[part]).max(initial=0.0) * len(part) for part in r] for r in step]
        time = step_time(np.array(loads), sync)
        assert time <= 1.05 * time_of_items(place, items, ranks, len(step[0]), sync is Sync.STEP)
    assert compared > 20


class Items(NamedTuple):
    """What the longest sample of each group costs, how many it has, and most of a micro-batch."""

    longest: FloatArray
    size: IntArray
    most: int


def next_places(items: Items, ranks: int, steps: int) -> IntArray | None:
    """Next fit, the micro-batches then dealt to ranks by falling cost; None if not all fit."""
    place, at, held, bins = np.zeros(len(items.size), dtype=np.int64), 0, 0, ranks * steps
    for i, size in enumerate(items.size):
        if held + size > items.most:
            at, held = at + 1, 0
        place[i], held = at, held + size
    if at >= bins:
        return None
    load = np.zeros(bins)
    for i, b in enumerate(place):
        load[b] = max(load[b], items.longest[i])
    load *= np.bincount(place, weights=items.size, minlength=bins)
    turn = np.empty(bins, dtype=np.int64)
    turn[np.argsort(-load, kind="stable")] = np.arange(bins)
    return (turn % ranks * steps + turn // ranks)[place]


def time_of_items(place: IntArray, items: Items, ranks: int, steps: int, per_step: bool) -> float:
    """Of padded micro-batches; those of like cost share a micro-step."""
    cost = np.array([
        items.longest[place == b].max(initial=0.0) * items.size[place == b].sum()
        for b in range(ranks * steps)
    ])  # fmt: skip
    if per_step:
        return step_time(cost.reshape(ranks, steps), Sync.STEP)
    return step_time(-np.sort(-cost).reshape(steps, ranks).T, Sync.MICRO_STEP)
