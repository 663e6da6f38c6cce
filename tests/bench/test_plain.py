"""Claims about the selection that ours is compared with."""

import numpy as np

from rollout_planner.types import Strategy, Window
from tests.bench.cells import Cell
from tests.bench.plain import measure, ours, plain

CELL = Cell("lognormal 64/8", 64, 8, 1.5, "lognormal", {"micro_batch_size": 1})


def test_a_dispatch_batch_leaves_with_all_that_may_not_be_skipped_again() -> None:
    generator = np.random.default_rng(3)
    tokens = generator.lognormal(8, 1, CELL.window).astype(np.int64) + 1
    skips = np.sort(generator.integers(0, 9, CELL.window))[::-1].copy()
    free = np.zeros(CELL.window, np.bool_)
    window = Window(tokens, skips, np.full(CELL.window, -1), free)
    chosen = plain(window, CELL.config(Strategy.WINDOW))
    assert len(np.unique(chosen)) == CELL.batch
    assert np.isin(np.flatnonzero(skips == 8), chosen).all()


def test_both_choose_better_than_the_oldest() -> None:
    def oldest(window: Window, _: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.arange(CELL.batch)

    without, by_columns, by_us = (
        measure(CELL, choose, 1, 30)[0] for choose in (oldest, plain, ours)
    )
    assert by_us < by_columns < 0.8 * without
