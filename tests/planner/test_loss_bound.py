"""A step's loss tokens stay near those of the mean step, as far as what is due lets them."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_planner import Quadratic, plan
from rollout_planner.selection import LossBound
from rollout_planner.types import Grouping, IntArray, PlanConfig, Window

SAMPLES = st.lists(
    st.tuples(st.integers(1, 60), st.booleans(), st.booleans()), min_size=2, max_size=40
)


@given(SAMPLES, st.floats(0, 100))
def test_exchanging_keeps_the_number_and_what_is_forced_and_comes_nearer(
    samples: list[tuple[int, bool, bool]], most: float
) -> None:
    tokens, kept, urgent = (np.array(column) for column in zip(*samples, strict=True))
    forced = urgent & kept
    bound = LossBound(tokens - float(tokens.mean()), most)
    found = bound.within(kept, forced)
    assert found.sum() == kept.sum()
    assert found[forced].all()
    before, after = abs(bound.above[kept].sum()), abs(bound.above[found].sum())
    assert after <= before + 1e-9
    if before <= most:
        assert (found == kept).all()


@given(SAMPLES, st.floats(1, 100))
def test_one_exchange_is_found_where_one_is_enough(
    samples: list[tuple[int, bool, bool]], most: float
) -> None:
    tokens, kept, urgent = (np.array(column) for column in zip(*samples, strict=True))
    bound = LossBound(tokens - float(tokens.mean()), most)
    forced = urgent & kept
    total = float(bound.above[kept].sum())
    found = bound.within(kept, forced)
    light = np.flatnonzero(~kept & (bound.above <= 0))
    heavy = np.flatnonzero(kept & ~forced & (bound.above > 0))
    if total > most and len(light) and len(heavy):
        heaviest = heavy[bound.above[heavy].argmax()]
        if abs(total - bound.above[heaviest] + bound.above[light[0]]) <= most:
            assert abs(bound.above[found].sum()) <= most + 1e-9


def test_the_least_heavy_change_places_first_as_the_others_are_company() -> None:
    tokens = np.array([90, 90, 30, 5, 5, 5, 5, 5], dtype=np.int64)
    above = tokens.astype(np.float64) - 20.0
    keep = np.array([1, 1, 1, 1, 0, 0, 0, 0], dtype=bool)
    found = LossBound(above, most=130.0).within(keep, np.zeros(8, dtype=bool))
    assert np.flatnonzero(found).tolist() == [0, 1, 3, 4]
    found = LossBound(above, most=60.0).within(keep, np.zeros(8, dtype=bool))
    assert np.flatnonzero(found).tolist() == [1, 3, 4, 5]


def test_what_is_heavy_leaves_in_time_for_no_step_to_carry_all_of_it() -> None:
    above, left = np.array([40.0, 40, 40, 40, -10, -10]), np.array([1, 1, 1, 1, 3, 3])
    none = np.zeros(6, dtype=bool)
    due = LossBound(above, most=80.0).due(left, none, take=3)
    assert np.flatnonzero(due).tolist() == [0, 1], "two now, and two in the last step they may"
    assert not LossBound(above, most=160.0).due(left, none, take=3).any()


#: Share of long samples; mean and standard deviation of what arrives.
RARE = 0.01
USUAL = (100 + RARE * 1400, 1400 * (RARE * (1 - RARE)) ** 0.5)


def arrivals(seed: int, rare: float) -> Iterator[IntArray]:
    """Lengths of 100 or so, and rarely 15 times as long."""
    chance = np.random.default_rng(seed)
    while True:
        tokens = chance.integers(50, 150, 16)
        yield np.where(chance.random(16) < rare, 1500, tokens)


def steps(variation: float | None, count: int = 200, rare: float = RARE) -> list[IntArray]:
    """Lengths of the samples of each step, from a window of a batch and a quarter."""
    config = PlanConfig(
        dp_size=16, dispatch_batch_size=128, cost=Quadratic(), micro_batch_tokens=3000,
        max_skips=8, grouping=Grouping.IGNORE, max_step_variation=variation,
    )  # fmt: skip
    source, found = arrivals(7, rare), []
    tokens = skips = np.zeros(0, dtype=np.int64)
    for _ in range(count):
        while len(tokens) < 160:
            tokens, skips = np.append(tokens, next(source)), np.append(skips, np.zeros(16, int))
        n = len(tokens)
        window = Window(tokens, skips, np.full(n, -1), np.zeros(n, dtype=bool), tokens - 1, USUAL)
        chosen = plan(window, config).chosen
        found.append(tokens[chosen])
        tokens, skips = np.delete(tokens, chosen), np.delete(skips, chosen) + 1
    return found


def weight_of_the_long(found: list[IntArray]) -> float:
    """Under token-mean, over what a mean token weighs."""
    loss = np.array([float(tokens.sum()) for tokens in found])
    long = np.array([float(tokens[tokens == 1500].sum()) for tokens in found])
    return float((long / loss).sum() / long.sum() * loss.mean())


def test_long_samples_keep_the_weight_that_the_bound_promises() -> None:
    free, bound, tight = (weight_of_the_long(steps(v)) for v in (None, 0.5, 0.3))
    assert free < 0.7, "or this shows nothing"
    assert free < bound < tight
    assert bound > 0.95 / 1.5
    assert tight > 0.95 / 1.3


@pytest.mark.parametrize("variation", [0.3, 0.5])
def test_no_step_strays_further_than_the_bound_or_arrivals(variation: float) -> None:
    mean, deviation = USUAL
    most = max(variation * mean * 128, deviation * 128**0.5)
    strayed = np.array([tokens.sum() - mean * 128 for tokens in steps(variation)])
    assert np.abs(strayed).max() < 1.1 * most, "what is due may be a little more"
