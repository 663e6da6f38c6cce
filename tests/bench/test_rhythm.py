"""Claims about the estimate of waiting in a perfect rhythm."""

import numpy as np
import pytest

from tests.bench.rhythm import rhythm_excess


def test_the_estimate_is_what_sorted_columns_wait_without_a_choice_and_falls_with_the_window() -> (
    None
):
    generator = np.random.default_rng(1)
    tokens = generator.lognormal(8, 0.6, 20_000).astype(np.int64)
    batches = generator.choice(tokens, (200, 512))
    cost = np.sort(batches.astype(float) ** 2 + 24576.0 * batches, axis=1)[:, ::-1]
    waits = 32 * cost[:, ::32].sum() / cost.sum() - 1
    assert rhythm_excess(tokens, 32, 512, 1) == pytest.approx(waits, rel=0.1)
    narrow, wide = (rhythm_excess(tokens, 32, 512, window) for window in (1.25, 2))
    assert wide < narrow < waits / 2
    assert rhythm_excess(np.full(99, 7), 32, 512, 2) == 0
