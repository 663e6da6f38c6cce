"""Claims about log_seqlen_unbalance: verl's figures under verl's names."""

import numpy as np
import pytest

from rollout_planner import balanced_partition, log_seqlen_unbalance


def test_the_figures_are_those_that_verl_logs() -> None:
    lengths = [10, 1, 1, 1, 4, 3]
    assert log_seqlen_unbalance(np.array(lengths), [[0], [1, 2, 3], [4, 5]], "seqlen") == {
        "seqlen/min": 2,
        "seqlen/max": 11,
        "seqlen/minmax_diff": 9,
        "seqlen/balanced_min": 3,
        "seqlen/balanced_max": 10,
        "seqlen/mean": 20 / 3,
    }


def test_a_batch_that_does_not_divide_is_cut_as_evenly_as_it_can_be() -> None:
    lengths = [4, 4, 4, 4, 4]
    parts = balanced_partition(lengths, 2, equal_size=False)
    found = log_seqlen_unbalance(lengths, parts, "s")
    assert (found["s/min"], found["s/max"], found["s/mean"]) == (8, 12, 10)


@pytest.mark.parametrize("i", [1, -1])
def test_an_index_of_no_length_is_an_error(i: int) -> None:
    with pytest.raises(ValueError, match=f"index {i}, and there are 1 lengths"):
        log_seqlen_unbalance([1], [[0], [i]], "s")


def test_no_parts_are_an_error() -> None:
    with pytest.raises(ValueError, match="no partitions"):
        log_seqlen_unbalance([1], [], "s")
