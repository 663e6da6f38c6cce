"""Claims about the comparison with a grouped sampler."""

import numpy as np
import pytest

from tests.bench.grouped import measure, rows


def test_excess_is_over_unpadded_work_in_each_way_to_meet() -> None:
    """Two ranks, one step: 1 1 3 3 beside 1 3 1 3, in micro-batches of two."""
    tokens = np.array([[[100, 100, 300, 300], [100, 300, 100, 300]]])
    step, packed, padded, distance = measure(tokens, 2)
    assert step == pytest.approx(0.0)
    assert 0 < packed < padded
    assert distance == pytest.approx(0.5)  # before half of the data, which are 100 tokens long


def test_every_sampler_yields_all_data_in_whole_steps() -> None:
    found = list(rows("lognormal", 4, 8, 2, steps=6))
    assert len(found) in {4, 5}  # with theirs, if it is unpacked here
    assert all(0 <= row.packed_excess <= row.padded_excess for row in found)
