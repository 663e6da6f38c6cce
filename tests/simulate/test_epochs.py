"""Arrivals: whole epochs, each in an order of its own, the same for everyone who asks."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from rollout_dispatcher.core.buffer.entry import MicroBatchLimits
from rollout_dispatcher.simulate import trace as module
from rollout_dispatcher.simulate.trace import Epochs, doomed
from tests.simulate.bench import make_trace

GROUPS = [0, 0, 0, 1, 1, -1, 2, 2, 0]


def ids(epochs: Epochs, units: int) -> list[list[str]]:
    return [[sample.sample_id for sample in unit] for unit in islice(epochs, units)]


def test_an_epoch_holds_every_row_once_and_the_next_is_ordered_otherwise() -> None:
    keys = [unit[0] for unit in ids(Epochs(make_trace(range(1, 41)), 0, whole_groups=False), 80)]
    first, second = keys[:40], keys[40:]
    assert sorted(first) == sorted(f"0-{row}" for row in range(40))
    assert sorted(second) == sorted(f"1-{row}" for row in range(40))
    assert [key[2:] for key in first] != [key[2:] for key in second]


def test_the_order_follows_the_seed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make_trace(range(1, 41))
    kept = ids(Epochs(trace, 3, whole_groups=False), 120)
    monkeypatch.setattr(module, "KEPT_SAMPLES", 50)
    assert ids(Epochs(trace, 3, whole_groups=False), 120) == kept
    assert ids(Epochs(trace, 4, whole_groups=False), 120) != kept


def test_groups_arrive_whole_and_know_their_size() -> None:
    trace = make_trace(range(1, 10), GROUPS)
    epoch = list(islice(Epochs(trace, 1, whole_groups=True), 4))
    rows = sorted(sorted(int(sample.sample_id[2:]) for sample in unit) for unit in epoch)
    assert rows == [[0, 1, 2, 8], [3, 4], [5], [6, 7]]
    for unit in epoch:
        assert {sample.group_size for sample in unit} == {len(unit)}
        assert len({sample.group_id for sample in unit}) == 1


def test_a_group_of_another_epoch_is_another_group() -> None:
    trace = make_trace([1, 2], [0, 0])
    first, second = islice(Epochs(trace, 0, whole_groups=True), 2)
    assert first[0].group_id != second[0].group_id


def test_timed_samples_come_in_order_of_time_and_ties_in_order_of_rows() -> None:
    trace = make_trace([5, 6, 7], arrival=[2.0, 1.0, 1.0])
    came = list(Epochs(trace, 9, whole_groups=False).once_in_order_of_arrival())
    assert [(at, sample.sample_id) for at, sample in came] == [
        (1.0, "0-1"),
        (1.0, "0-2"),
        (2.0, "0-0"),
    ]


def test_a_sample_that_is_too_long_dooms_its_group_where_groups_matter() -> None:
    trace = make_trace(range(1, 10), GROUPS)
    assert np.flatnonzero(doomed(trace, 7, whole_groups=False)).tolist() == [7, 8]
    assert np.flatnonzero(doomed(trace, 7, whole_groups=True)).tolist() == [0, 1, 2, 6, 7, 8]
    assert not doomed(trace, None, whole_groups=True).any()


def test_a_group_that_fits_no_micro_batch_is_doomed_where_it_has_to_stay_in_one() -> None:
    trace = make_trace([3, 3, 3, 4, 4, 9], [0, 0, 0, 1, 1, -1])
    limits = MicroBatchLimits(tokens=8, drops=True)
    gone = doomed(trace, 10, whole_groups=True, micro_batch=limits)
    assert np.flatnonzero(gone).tolist() == [0, 1, 2]
    padded = replace(limits, tokens=11, length_multiple=4)
    gone = doomed(trace, 10, whole_groups=True, micro_batch=padded)
    assert np.flatnonzero(gone).tolist() == [0, 1, 2]
