"""Claims about the comparison of a window with none."""

from itertools import islice

import numpy as np
import pytest

from rollout_planner.types import Strategy
from tests.bench.cells import Cell, stream
from tests.bench.planner import steady


@pytest.mark.parametrize("window", [1.0, 1.25])
def test_a_run_is_over_when_the_last_of_its_samples_has_left(window: float) -> None:
    cell = Cell("short", 32, 4, window, "lognormal", {"micro_batch_tokens": 131072})
    left = [
        held.tokens[step.chosen] for held, step in steady(cell, Strategy.WINDOW, 5, samples=160)
    ]
    assert [len(each) for each in left] == [32] * 5
    came = sorted(islice(stream(cell, 5), 160))
    assert np.sort(np.concatenate(left)).tolist() == came
