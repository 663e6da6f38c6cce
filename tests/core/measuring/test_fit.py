"""What micro-batches took becomes their cost: once it is sure, and as far as they tell."""

import numpy as np
import pytest

from rollout_dispatcher.core.measuring.fit import CostFit, terms_of
from rollout_planner.cost import Quadratic
from rollout_planner.types import FloatArray, IntArray

PRIOR = Quadratic()


def steps(
    fit: CostFit, truth: FloatArray, count: int, *, far: float = 0.0, noise: float = 0.05
) -> None:
    """`count` steps of 32 micro-batches under a budget, whose times follow `truth`, to a noise.

    far: share of micro-batches that took five times as long.
    """
    rng = np.random.default_rng(0)
    for _ in range(count):
        counts = rng.integers(1, 9, 32)
        tokens = np.clip(rng.lognormal(8.5, 1.0, int(counts.sum())), 16, 65536).astype(np.int64)
        terms = terms_of(tokens, counts)
        took = terms @ truth * np.exp(noise * rng.standard_normal(32))
        took[rng.random(32) < far] *= 5
        fit.note(terms, believed(tokens, counts), took)


def believed(tokens: IntArray, counts: IntArray) -> FloatArray:
    which = np.repeat(np.arange(len(counts)), counts)
    cost: FloatArray = np.bincount(which, weights=PRIOR(tokens), minlength=len(counts)).astype(
        float
    )
    return cost


def test_terms_are_sums_over_samples_or_over_what_is_padded() -> None:
    tokens, counts = np.array([3, 1, 2]), np.array([2, 0, 1])
    assert terms_of(tokens, counts).tolist() == [[10, 4, 2, 1], [0, 0, 0, 1], [4, 2, 1, 1]]
    assert terms_of(tokens, counts, padded=True)[0].tolist() == [18, 6, 2, 1]


@pytest.mark.parametrize("far", [0.0, 0.02])
@pytest.mark.parametrize("ratio", [2_000, 70_000, 150_000])
def test_another_ratio_is_found_within_a_tenth_though_some_took_five_times_as_long(
    ratio: float, far: float
) -> None:
    fit = CostFit(PRIOR)
    steps(fit, np.array([1e-9, 1e-9 * ratio, 0, 2e-9 * ratio * 1000]), 40, far=far)
    assert fit.in_use is not None
    assert fit.in_use.b / fit.in_use.a == pytest.approx(ratio, rel=0.1)
    assert fit.in_use.error == pytest.approx(0.05, rel=0.2)


def test_a_cost_that_is_right_stays_in_use() -> None:
    fit = CostFit(PRIOR)
    steps(fit, np.array([1e-9, 1e-9 * 24576, 0, 0.01]), 60)
    assert (fit.version, fit.cost) == (0, PRIOR)


def test_nothing_is_negative_whatever_ranks_say() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        fit = CostFit(PRIOR)
        for _ in range(4):
            tokens = rng.integers(1, 9000, 40)
            took = (10.0 ** rng.integers(-6, 6, 8) * rng.integers(0, 2, 8)).astype(np.float64)
            counts = np.full(8, 5)
            fit.note(terms_of(tokens, counts), believed(tokens, counts), took)
        found = fit.in_use
        assert found is None or min(found.a, found.b, found.c, found.d) >= 0
        assert (fit.cost(np.arange(1, 100)) >= 0).all()
