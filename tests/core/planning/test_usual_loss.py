"""What arrives is known from what no plan has passed over yet, and older arrivals fade."""

import numpy as np
import pytest

from rollout_dispatcher.core.planning.planning import UsualLoss
from rollout_planner.types import Window


def window(*samples: tuple[int, int]) -> Window:
    """Loss tokens and skips of each sample."""
    loss, skips = (np.array(column, dtype=np.int64) for column in zip(*samples, strict=True))
    n = len(samples)
    return Window(loss + 1, skips, np.full(n, -1), np.zeros(n, dtype=np.bool_), loss)


def test_each_arrival_counts_once_and_what_was_held_back_no_more() -> None:
    usual = UsualLoss()
    first, second = window((10, 0), (30, 0)), window((30, 1), (20, 0), (20, 0))
    assert usual.with_(first) == pytest.approx((20, 10))
    usual.planned(first)
    mean, deviation = usual.with_(second)
    assert mean == pytest.approx(20)
    assert deviation == pytest.approx((0.98 * 200 / (0.98 * 2 + 2)) ** 0.5)


def test_where_no_arrival_is_known_the_window_says_it() -> None:
    assert UsualLoss().with_(window((10, 1), (30, 2))) == (20, 10)


def test_lengths_that_change_are_followed() -> None:
    usual = UsualLoss()
    for loss in [10] * 200 + [50] * 200:
        usual.planned(window((loss, 0)))
    mean, _ = usual.with_(window((50, 0)))
    assert mean > 49
