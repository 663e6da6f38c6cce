"""Claims about what plans are put beside in the bench of properties."""

import numpy as np
import pytest

from rollout_planner.types import Grouping, PlanConfig, Sync
from tests.bench.properties import Windows, all_splits, of_windows


def config(sync: Sync, size: int) -> PlanConfig:
    """Two ranks, four samples, whose cost is their tokens."""
    return PlanConfig(
        dp_size=2, dispatch_batch_size=4, cost=lambda tokens: tokens.astype(np.float64),
        grouping=Grouping.IGNORE, micro_batch_size=size, sync=sync,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sync", "size", "micro_batches", "best"),
    [(Sync.MICRO_STEP, 1, 2, 9 + 2), (Sync.STEP, 1, 2, 9 + 1), (Sync.STEP, 3, 1, 9)],
)
def test_the_best_split_is_among_all(
    sync: Sync, size: int, micro_batches: int, best: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 9 5 2 1: two rows of neighbours, equal counts, and the 9 alone."""
    monkeypatch.setattr("tests.bench.properties.COST", lambda tokens: tokens.astype(np.float64))
    found = list(all_splits(np.array([9, 5, 2, 1]), micro_batches, config(sync, size)))
    paces = (cost if sync is Sync.STEP else cost.max(axis=0, keepdims=True) for cost in found)
    assert min(float(pace.sum(axis=1).max()) for pace in paces) == best


def test_the_largest_rise_is_that_from_one_window_to_the_next() -> None:
    found = of_windows("some", Sync.STEP, [[9.0, 7.0], [3.0, 2.0], [3.5, 1.0], [1.0, 1.0]])
    assert found == Windows("some", Sync.STEP, [8.0, 2.5, 2.25, 1.0], -0.25, 0.5)
