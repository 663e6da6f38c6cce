"""Length counts: totals, octaves and the distance of two distributions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.lengths import LengthCounts


def counted(lengths: list[int]) -> LengthCounts:
    counts = LengthCounts()
    for length in lengths:
        counts.add(length)
    return counts


@given(st.lists(st.integers(1, 2**31 - 1), max_size=50))
def test_octaves_count_what_is_shorter_than_each_power_of_two(lengths: list[int]) -> None:
    counts = counted(lengths)
    for bound, below in counts.octaves():
        assert below == sum(length < bound for length in lengths)
    assert (counts.samples, counts.tokens) == (len(lengths), sum(lengths))


def test_equal_distributions_are_at_distance_zero_and_disjoint_ones_at_one() -> None:
    short, long = counted([10] * 50), counted([1000] * 7)
    assert short.distance(counted([10] * 3)) == 0
    assert short.distance(long) == 1
    assert short.distance(LengthCounts()) == 0


def test_the_distance_is_kolmogorov_smirnovs() -> None:
    rng = np.random.default_rng(1)
    first = rng.lognormal(6, 1, 4000).astype(int) + 1
    second = rng.lognormal(6.3, 1, 4000).astype(int) + 1
    grid = np.union1d(first, second)
    exact = np.abs(
        np.searchsorted(np.sort(first), grid, "right") / len(first)
        - np.searchsorted(np.sort(second), grid, "right") / len(second)
    ).max()
    distance = counted(first.tolist()).distance(counted(second.tolist()))
    assert abs(distance - exact) < 0.02
