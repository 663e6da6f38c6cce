"""Length counts: totals, octaves and the distance of two distributions."""

from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.core.totals import (
    BINS_PER_OCTAVE,
    COUNTED_TOGETHER,
    OCTAVES,
    LengthCounts,
    ks_distance,
)


def counted(lengths: list[int]) -> LengthCounts:
    counts = LengthCounts()
    counts.add(lengths)
    return counts


@given(st.lists(st.integers(1, 2**31 - 1), max_size=50))
def test_octaves_count_what_is_shorter_than_each_power_of_two(lengths: list[int]) -> None:
    counts = counted(lengths)
    for bound, below in counts.octaves():
        assert below == sum(length < bound for length in lengths)
    assert (counts.samples, counts.tokens) == (len(lengths), sum(lengths))


@pytest.mark.parametrize("count", [1, COUNTED_TOGETHER - 1, COUNTED_TOGETHER, 3000])
def test_lengths_are_counted_however_many_come_at_a_time(count: int) -> None:
    lengths = [1 + at % 700 for at in range(3000)]
    counts = LengthCounts()
    for start in range(0, len(lengths), count):
        counts.add(lengths[start : start + count])
    assert counts.counts.tolist() == counted(lengths).counts.tolist()
    assert counts.counts.sum() == counts.samples == len(lengths)


def test_a_length_is_in_the_bin_of_its_logarithm() -> None:
    bins = BINS_PER_OCTAVE * OCTAVES
    near = {round(2 ** (at / BINS_PER_OCTAVE)) + off for at in range(bins) for off in (-1, 0, 1)}
    for length in sorted(near - {0}):
        (found,) = np.flatnonzero(counted([length]).counts)
        assert found == int(log2(length) * BINS_PER_OCTAVE)


def test_equal_distributions_are_at_distance_zero_and_disjoint_ones_at_one() -> None:
    short, long = counted([10] * 50), counted([1000] * 7)
    assert ks_distance(short.counts, counted([10] * 3).counts) == 0
    assert ks_distance(short.counts, long.counts) == 1
    assert ks_distance(short.counts, LengthCounts().counts) == 0


def test_the_distance_is_kolmogorov_smirnovs() -> None:
    rng = np.random.default_rng(1)
    first = rng.lognormal(6, 1, 4000).astype(int) + 1
    second = rng.lognormal(6.3, 1, 4000).astype(int) + 1
    grid = np.union1d(first, second)
    exact = np.abs(
        np.searchsorted(np.sort(first), grid, "right") / len(first)
        - np.searchsorted(np.sort(second), grid, "right") / len(second)
    ).max()
    distance = ks_distance(counted(first.tolist()).counts, counted(second.tolist()).counts)
    assert abs(distance - exact) < 0.02
