"""Claims about balance_batch: all rows once, work level, order restored."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.balance import balance_batch, tokens
from rollout_dispatcher.errors import PlanError


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_the_inverse_restores_the_order(lengths: list[int], chunks: int) -> None:
    rows = np.arange(len(lengths))
    if len(lengths) < chunks:
        with pytest.raises(PlanError, match="use fewer chunks"):
            balance_batch({"row": rows}, chunks, lengths=lengths)
        return
    parts, inverse = balance_batch({"row": rows}, chunks, lengths=lengths)
    assert len(parts) == chunks
    assert np.concatenate([part["row"] for part in parts])[inverse].tolist() == rows.tolist()


def test_tensors_arrays_and_lists_are_split_alike() -> None:
    mask = torch.tril(torch.ones(6, 6, dtype=torch.int64))
    mapping = {"attention_mask": mask, "reward": np.arange(6.0), "name": list("abcdef")}
    parts, inverse = balance_batch(mapping, 2, cost=tokens)
    assert torch.equal(torch.cat([part["attention_mask"] for part in parts])[inverse], mask)
    sums = [int(part["attention_mask"].sum()) for part in parts]
    assert sorted(sums) == [10, 11]
    names = [name for part in parts for name in part["name"]]
    assert [names[i] for i in inverse] == list("abcdef")


def test_one_giant_gets_a_chunk_of_its_own() -> None:
    parts, _ = balance_batch({"row": np.arange(5)}, 2, lengths=[1, 1, 9000, 1, 1])
    assert [part["row"].tolist() for part in parts] == [[2], [0, 1, 3, 4]]


def test_rows_that_do_not_match_are_refused() -> None:
    with pytest.raises(PlanError, match="differ in their number of rows"):
        balance_batch({"a": [1], "b": [1, 2]}, 1, lengths=[1])
    with pytest.raises(PlanError, match="3 lengths for rows"):
        balance_batch({"a": [1, 2]}, 1, lengths=[1, 2, 3])
    with pytest.raises(PlanError, match="attention_mask"):
        balance_batch({"a": [1, 2]}, 1)
