"""A slow rank is found whatever its share of the work is, and one long step makes nobody slow."""

import numpy as np
import pytest

from rollout_dispatcher.core.measuring.speeds import (
    COMPARED_A_STEP,
    COMPARED_STEPS,
    ModelError,
    RankSpeeds,
    lower_median,
)
from rollout_dispatcher.core.measuring.times import Pass, Split
from rollout_planner.types import FloatArray

RNG = np.random.default_rng(7)


def took(compute: FloatArray) -> Split:
    """A pass without any wait."""
    known = Pass()
    for dp_rank, busy in enumerate(compute.tolist()):
        known.report(dp_rank, busy, [0.0] * len(busy))
    split = known.split(len(compute))
    assert isinstance(split, Split)
    return split


def shares(ranks: int, micro_batches: int = 4) -> FloatArray:
    return RNG.uniform(1, 3, (ranks, micro_batches))


def told(factors: list[float], steps: int = 12, spoilt: dict[int, int] | None = None) -> FloatArray:
    """What is told of ranks of these factors; spoilt: which rank takes a minute more, by step."""
    speeds = RankSpeeds(len(factors))
    for step in range(steps):
        planned = shares(len(factors))
        compute = planned * np.array(factors)[:, None] * RNG.uniform(0.98, 1.02, planned.shape)
        if spoilt and step in spoilt:
            compute[spoilt[step], 0] += 60
        speeds.note(compute.sum(axis=1), planned)
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
    assert told(factors) == pytest.approx(slowness, rel=0.03)


def test_single_long_steps_make_nobody_slow() -> None:
    often = {step: step // 5 % 4 for step in range(0, 60, 5)} | {1: 2}
    assert told([1] * 4, 60, often).max() < 1.05


def test_a_rank_that_becomes_slow_is_named_within_a_few_steps_and_forgiven_as_soon() -> None:
    speeds = RankSpeeds(4)
    planned = np.ones((4, 2))
    slow = planned * [[1], [1], [1.4], [1]]
    for found in (planned,) * 30 + (slow,) * 10:
        speeds.note(found.sum(axis=1), planned)
    assert speeds.slowness[2] > 1.2
    for _ in range(30):
        speeds.note(planned.sum(axis=1), planned)
    assert speeds.slowness[2] < 1.05


def test_nothing_is_said_of_too_few_steps_nor_of_a_rank_that_has_nothing_to_do() -> None:
    assert np.isnan(told([1, 2], steps=2)).all()
    speeds = RankSpeeds(3)
    planned = np.array([[1.0], [1.0], [0.0]])
    for _ in range(5):
        speeds.note(np.ones(3), planned)
    assert speeds.slowness.tolist()[:2] == [1, 1]
    assert np.isnan(speeds.slowness[2])


def test_a_lower_median_passes_over_what_is_not_known() -> None:
    table = np.array([[1, np.nan], [4, np.nan], [np.nan, np.nan], [2, np.nan], [3, np.nan]])
    assert lower_median(table)[0] == 2
    assert np.isnan(lower_median(table)[1])


def test_the_error_of_the_model_is_what_no_factor_a_rank_explains() -> None:
    exact, off = ModelError(), ModelError()
    for _ in range(20):
        planned = shares(4)
        compute = planned * [[0.5], [1], [1], [2]]
        exact.note(took(compute), planned)
        off.note(took(compute * RNG.uniform(0.75, 1.25, planned.shape)), planned)
    assert exact.value == pytest.approx(0, abs=1e-9)
    assert off.value is not None
    assert off.value == pytest.approx(0.125, rel=0.3)


def test_the_error_is_not_told_of_too_few_and_what_it_holds_is_bounded() -> None:
    error = ModelError()
    assert error.value is None
    error.note(took(np.ones((2, 3))), np.ones((2, 3)))
    assert error.value is None, "three of a rank say nothing beside its factor"
    for _ in range(2 * COMPARED_STEPS):
        error.note(took(np.ones((64, 64))), np.ones((64, 64)))
    assert len(error._steps) == COMPARED_STEPS
    split, planned = error._steps[0]
    ranks, _ = error._some(3, split.compute, planned)
    assert len(ranks) <= COMPARED_A_STEP
    assert len(set(ranks.tolist())) == 64, "of every rank"
    assert error.value == 0


def test_steps_that_were_timed_as_a_whole_say_nothing_of_the_model() -> None:
    error = ModelError()
    for _ in range(8):
        whole = np.zeros((2, 3))
        whole[:, 0] = 3
        error.note(took(whole), np.ones((2, 3)))
    assert error.value is None
