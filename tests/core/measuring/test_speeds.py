"""A slow rank is found whatever its share of the work is, and one long step makes nobody slow."""

import numpy as np
import pytest

from rollout_dispatcher.core.measuring.speeds import RankSpeeds, lower_median
from rollout_planner.types import FloatArray

RNG = np.random.default_rng(7)


def shares(ranks: int, micro_batches: int = 4) -> FloatArray:
    return RNG.uniform(1, 3, (ranks, micro_batches))


def slowness_of(
    factors: list[float], steps: int = 12, spoilt: dict[int, int] | None = None
) -> FloatArray:
    """Measured slowness of these factors; spoilt: the rank that takes a minute more, by step."""
    speeds = RankSpeeds(len(factors))
    for step in range(steps):
        planned = shares(len(factors))
        compute = planned * np.array(factors)[:, None] * RNG.uniform(0.98, 1.02, planned.shape)
        if spoilt and step in spoilt:
            compute[spoilt[step], 0] += 60
        speeds.add(compute.sum(axis=1), planned)
    return speeds.slowness


@pytest.mark.parametrize(
    ("factors", "slowness"),
    [
        ([1, 1, 1, 1.4], [1, 1, 1, 1.4]),
        ([2, 2, 2, 2.8], [1, 1, 1, 1.4]),
        ([1, 1.4, 1, 1.4], [1, 1.4, 1, 1.4]),
        ([1, 1.4], [1, 1.4]),
        ([1.4, 1.4, 1.4, 1], [1, 1, 1, 1 / 1.4]),
        ([3], [1]),
    ],
)
def test_slowness_is_against_the_median_rank(factors: list[float], slowness: list[float]) -> None:
    assert slowness_of(factors) == pytest.approx(slowness, rel=0.03)


def test_single_long_steps_make_nobody_slow() -> None:
    often = {step: step // 5 % 4 for step in range(0, 60, 5)} | {1: 2}
    assert slowness_of([1] * 4, 60, often).max() < 1.05


def test_a_rank_that_becomes_slow_is_named_within_a_few_steps_and_forgiven_as_soon() -> None:
    speeds = RankSpeeds(4)
    planned = np.ones((4, 2))
    slow = planned * [[1], [1], [1.4], [1]]
    for found in (planned,) * 30 + (slow,) * 10:
        speeds.add(found.sum(axis=1), planned)
    assert speeds.slowness[2] > 1.2
    for _ in range(30):
        speeds.add(planned.sum(axis=1), planned)
    assert speeds.slowness[2] < 1.05


def test_nothing_is_known_of_too_few_steps_nor_of_a_rank_that_has_nothing_to_do() -> None:
    assert np.isnan(slowness_of([1, 2], steps=2)).all()
    speeds = RankSpeeds(3)
    planned = np.array([[1.0], [1.0], [0.0]])
    for _ in range(5):
        speeds.add(np.ones(3), planned)
    assert speeds.slowness.tolist()[:2] == [1, 1]
    assert np.isnan(speeds.slowness[2])


def revised(
    factors: list[float], steps: int, used: tuple[float, ...] | None = None, noise: float = 0.03
) -> tuple[float, ...]:
    """What plans go by after so many steps of ranks of these factors."""
    speeds, used = RankSpeeds(len(factors)), used or (1.0,) * len(factors)
    for _ in range(steps):
        work = shares(len(factors))
        compute = work * np.array(factors)[:, None] * np.exp(noise * RNG.normal(size=work.shape))
        speeds.add(compute.sum(axis=1), work)
        used = speeds.revised(used)
    return used


def test_plans_go_by_a_speed_once_it_is_sure_and_by_small_ones_later() -> None:
    assert revised([1, 1, 1, 1.5], 7) == (1, 1, 1, 1)
    assert revised([1, 1, 1, 1.5], 8) == pytest.approx((1, 1, 1, 1.5), rel=0.04)
    assert revised([1, 1.05, 1, 1], 60) == pytest.approx((1, 1.05, 1, 1), rel=0.02)


def test_plans_go_by_no_speed_without_evidence() -> None:
    moved = [revised([1.0] * ranks, 300, noise=0.05) for ranks in (2, 4, 8, 64)]
    assert all(0.94 < slow < 1.06 for each in moved for slow in each)
    assert sum(slow != 1 for each in moved for slow in each) <= 4


def test_a_speed_that_no_longer_holds_is_given_up() -> None:
    assert revised([1.0] * 4, 60, used=(1, 1, 1.5, 1)) == pytest.approx((1,) * 4, rel=0.03)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_ranks_wait_hardly_longer_than_by_shares_that_are_right(noise: float) -> None:
    """One of four is 1.5 times as slow, from step to step all of them somewhat more or less."""
    factors, waits = np.array([1.0, 1.5, 1.0, 1.0]), np.zeros(2)
    for seed in range(20):
        rng, speeds, used = np.random.default_rng(seed), RankSpeeds(4), tuple([1.0] * 4)
        for step in range(50):
            took = factors * np.exp(noise * rng.standard_normal(4))
            work = np.array([1 / np.array(used), 1 / factors])
            work /= work.sum(axis=1, keepdims=True)
            if step >= 10:
                seconds = work * took
                waits += 1 - seconds.mean(axis=1) / seconds.max(axis=1)
            speeds.add(work[0] * took, work[0][:, None])
            used = speeds.revised(used)
    assert waits[0] < 1.1 * waits[1]


def test_a_speed_is_bounded() -> None:
    assert revised([1, 1, 20, 1], 20)[2] == 4


def test_a_lower_median_passes_over_what_is_not_known() -> None:
    table = np.array([[1, np.nan], [4, np.nan], [np.nan, np.nan], [2, np.nan], [3, np.nan]])
    assert lower_median(table)[0] == 2
    assert np.isnan(lower_median(table)[1])
