"""The fit finds what micro-batches took, as far as they show it, whatever else happened to some."""

import numpy as np
import pytest

from rollout_dispatcher.core.measuring.fit import Fit, fit_cost, terms_of
from rollout_planner.cost import Quadratic
from rollout_planner.types import FloatArray, computed_lengths

BELIEVED = Quadratic()


def fitted(truth: FloatArray, *, far: float = 0.0, noise: float = 0.05, seed: int = 0) -> Fit:
    """To 1280 micro-batches whose times follow `truth` to a noise.

    far: share of micro-batches that took five times as long.
    """
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 9, 1280)
    tokens = np.clip(rng.lognormal(8.5, 1.0, int(counts.sum())), 16, 65536).astype(np.int64)
    terms = terms_of(tokens, counts)
    took = terms @ truth * np.exp(noise * rng.standard_normal(len(counts)))
    took[rng.random(len(counts)) < far] *= 5
    return fit_cost(terms, took, BELIEVED)


def test_terms_are_sums_over_samples_or_over_what_is_padded() -> None:
    tokens, counts = np.array([3, 1, 2]), np.array([2, 0, 1])
    assert terms_of(tokens, counts).tolist() == [[10, 4, 2, 1], [0, 0, 0, 1], [4, 2, 1, 1]]
    padded = computed_lengths(tokens, counts, padded=True)
    assert terms_of(padded, counts)[0].tolist() == [18, 6, 2, 1]
    longer = computed_lengths(tokens, counts, padded=False, multiple=4)
    assert terms_of(longer, counts)[0].tolist() == [32, 8, 2, 1]


@pytest.mark.parametrize("far", [0.0, 0.02])
@pytest.mark.parametrize("ratio", [2_000, 70_000, 150_000])
def test_another_ratio_is_found_within_a_tenth_though_some_took_five_times_as_long(
    ratio: float, far: float
) -> None:
    found = fitted(np.array([1e-9, 1e-9 * ratio, 0, 2e-9 * ratio * 1000]), far=far)
    a, b, _, _ = found.coefficients
    assert b / a == pytest.approx(ratio, rel=0.1)
    assert found.error == pytest.approx(0.05, rel=0.2)


def test_micro_batches_that_are_all_alike_leave_what_was_believed() -> None:
    terms = np.tile(terms_of(np.full(4, 1000), np.array([4])), (200, 1))
    a, b, _, _ = fit_cost(terms, np.full(200, 0.3), BELIEVED).coefficients
    assert b / a == pytest.approx(BELIEVED.b / BELIEVED.a, rel=0.1)


def test_nothing_is_negative_whatever_ranks_say() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        terms = terms_of(rng.integers(1, 9000, 160), np.full(32, 5))
        took = (10.0 ** rng.integers(-6, 6, 32)).astype(np.float64)
        found = fit_cost(terms, took, BELIEVED)
        assert found.coefficients.min() >= 0
        assert found.coefficients[:2].max() > 0, "a cost, as Quadratic wants it"
