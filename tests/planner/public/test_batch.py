"""Claims about balance_batch: all rows once, work level, order restored."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import PlanError
from rollout_planner import Quadratic, balance_batch, tokens


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_the_inverse_restores_the_order(lengths: list[int], chunks: int) -> None:
    rows = np.arange(len(lengths))
    if len(lengths) < chunks:
        with pytest.raises(PlanError, match="use fewer parts"):
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


def test_a_mask_may_be_lists_as_tokenizers_give_them() -> None:
    masks = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    parts, _ = balance_batch({"attention_mask": masks}, 2, cost=tokens)
    assert [sum(map(sum, part["attention_mask"])) for part in parts] == [5, 5]


def test_one_giant_gets_a_chunk_of_its_own() -> None:
    parts, _ = balance_batch({"row": np.arange(5)}, 2, lengths=[1, 1, 9000, 1, 1])
    assert [part["row"].tolist() for part in parts] == [[2], [0, 1, 3, 4]]


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_work_may_be_in_any_unit(unit: float) -> None:
    lengths = [0, 900, 100, 100, 100, 0]
    chunks, _ = balance_batch({"row": lengths}, 2, lengths=lengths, cost=Quadratic(0.0, unit))
    assert sorted(sum(chunk["row"]) for chunk in chunks) == [300, 900]
    assert [len(chunk["row"]) for chunk in chunks] == [3, 3]


def test_rows_that_do_not_match_are_refused() -> None:
    with pytest.raises(PlanError, match="'b' differs in its number of rows, 2, from the 1 lengths"):
        balance_batch({"a": [1], "b": [1, 2]}, 1, lengths=[1])
    with pytest.raises(PlanError, match="'a' differs in its number of rows, 2, from the 3 lengths"):
        balance_batch({"a": [1, 2]}, 1, lengths=[1, 2, 3])
    with pytest.raises(PlanError, match="attention_mask"):
        balance_batch({"a": [1, 2]}, 1)


ROWS = (5, 2, 7, 1)


def jagged() -> torch.Tensor:
    rows = [torch.arange(length) for length in ROWS]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_jagged_tensors_tell_their_lengths_and_stay_jagged() -> None:
    chunks, _ = balance_batch({"input_ids": jagged(), "row": torch.arange(4)}, 2, equal_size=True)
    assert [chunk["row"].tolist() for chunk in chunks] == [[2, 3], [0, 1]]
    for chunk in chunks:
        assert chunk["input_ids"].layout is torch.jagged
        found = [len(row) for row in chunk["input_ids"].unbind()]
        assert found == [ROWS[row] for row in chunk["row"]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_older_layout_are_split_too() -> None:
    value = torch.nested.nested_tensor([torch.arange(length) for length in ROWS])
    chunks, _ = balance_batch({"input_ids": value, "row": torch.arange(4)}, 2, equal_size=True)
    for chunk in chunks:
        assert chunk["input_ids"].layout is torch.strided
        found = [len(row) for row in chunk["input_ids"].unbind()]
        assert found == [ROWS[row] for row in chunk["row"]]


def test_jagged_tensors_of_one_shape_can_still_be_added() -> None:
    ids: Any = jagged()
    other = torch.nested.as_nested_tensor([torch.ones(3)] * 4, layout=torch.jagged)
    wide = torch.nested.nested_tensor_from_jagged(
        torch.randn(int(ids.offsets()[-1]), 2, requires_grad=True), ids.offsets()
    )
    mapping = {"input_ids": ids, "inner": {"mask": ids * 2}, "other": other, "wide": wide}
    for chunk in balance_batch(mapping, 2)[0]:
        found = chunk["input_ids"] + chunk["inner"]["mask"] + chunk["wide"].sum(-1) * 0
        expected = chunk["input_ids"].values() * 3
        assert torch.equal(found.values(), expected.to(found.dtype))
        assert [len(row) for row in chunk["other"].unbind()] == [3] * len(chunk["other"])
        assert chunk["wide"].requires_grad


def test_jagged_tensors_with_holes_keep_their_rows_beside_others_with_the_same_offsets() -> None:
    values, offsets = torch.arange(16), torch.tensor([0, 4, 8, 12, 16])
    lengths = {"short": [1, 2, 3, 4], "long": [4, 1, 2, 1]}
    mapping = {
        name: torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor(each))
        for name, each in lengths.items()
    }
    chunks, inverse = balance_batch(mapping, 2, lengths=ROWS)
    for name, each in lengths.items():
        found = [row.tolist() for chunk in chunks for row in chunk[name].unbind()]
        starts = range(0, 16, 4)
        expected = [[*range(at, at + held)] for at, held in zip(starts, each, strict=True)]
        assert [found[at] for at in inverse] == expected


def test_a_later_ragged_dimension_stays_where_it_was() -> None:
    rows = [torch.arange(2 * length).reshape(2, length) for length in ROWS]
    value = torch.nested.as_nested_tensor([row.t() for row in rows], layout=torch.jagged)
    chunks, inverse = balance_batch({"positions": value.transpose(1, 2)}, 2, lengths=ROWS)
    found = [row for chunk in chunks for row in chunk["positions"].unbind()]
    assert all(torch.equal(found[at], row) for at, row in zip(inverse, rows, strict=True))


def test_chunks_of_equal_size_have_as_many_rows() -> None:
    lengths = [900, 1, 1, 1, 1, 1]
    sizes = {True: [2, 2, 2], False: [1, 3, 2]}
    for equal_size, expected in sizes.items():
        chunks, _ = balance_batch({"row": lengths}, 3, lengths=lengths, equal_size=equal_size)
        assert sorted(len(chunk["row"]) for chunk in chunks) == sorted(expected)
    with pytest.raises(ValueError, match="6 items do not split into 4 parts of equal size"):
        balance_batch({"row": lengths}, 4, lengths=lengths, equal_size=True)


def test_what_concerns_the_batch_as_a_whole_is_in_every_chunk() -> None:
    whole = {"step": 7, "name": "run", "scale": torch.tensor(2.0), "stop": ["a", "b"], "no": None}
    mapping = {"row": [0, 1, 2, 3], "info": {"score": np.arange(4), "split": "train"}} | whole
    chunks, _ = balance_batch(mapping, 2, lengths=ROWS, meta=["stop"])
    for chunk in chunks:
        assert {name: chunk[name] for name in whole} == whole
        assert chunk["info"]["score"].tolist() == chunk["row"]
        assert chunk["info"]["split"] == "train"


if importlib.util.find_spec("tensordict") is None:

    @pytest.mark.skip(reason="NOT TRIED: tensordict is not installed here")
    def test_a_tensordict_comes_out_as_it_went_in() -> None:
        """Its test is below, for who has the package."""

else:

    def test_a_tensordict_comes_out_as_it_went_in() -> None:
        from tensordict import NonTensorData, NonTensorStack, TensorDict  # noqa: PLC0415

        values = {
            "row": torch.arange(4),
            "uid": NonTensorStack(*"abcd"),
            "temperature": NonTensorData(0.7),
            "inner": TensorDict({"row": torch.arange(4)}, batch_size=[4]),
        }
        for more in ({}, {"input_ids": jagged()}):
            mapping = TensorDict(values | more, batch_size=[4])
            chunks, _ = balance_batch(mapping, 2, lengths=ROWS, equal_size=True)
            for chunk in chunks:
                assert isinstance(chunk, TensorDict)
                assert chunk.batch_size == (2,)
                assert list(chunk["uid"]) == ["abcd"[row] for row in chunk["row"]]
                assert torch.equal(chunk["inner"]["row"], chunk["row"])
                assert chunk["temperature"] == 0.7
            if more:
                lengths = [len(row) for row in chunks[0]["input_ids"].unbind()]
                assert lengths == [7, 1]

    def test_a_jagged_tensor_may_be_in_a_tensordict_within() -> None:
        from tensordict import TensorDict  # noqa: PLC0415

        inner = TensorDict({"input_ids": jagged()}, batch_size=[4])
        mapping = TensorDict({"row": torch.arange(4), "inner": inner}, batch_size=[4])
        chunks, _ = balance_batch(mapping, 2, lengths=ROWS, equal_size=True)
        for chunk in chunks:
            rows = chunk["inner"]["input_ids"].unbind()
            assert [len(row) for row in rows] == [ROWS[row] for row in chunk["row"]]

    def test_chunks_of_a_tensordict_keep_its_device_and_names() -> None:
        from tensordict import TensorDict  # noqa: PLC0415

        values = {"input_ids": jagged(), "row": torch.arange(4)}
        mapping = TensorDict(values, batch_size=[4], device="cpu", names=["sample"])
        for chunk in balance_batch(mapping, 2)[0]:
            assert chunk.device == mapping.device
            assert chunk.names == ["sample"]

    def test_of_a_tensordict_meta_names_no_rows() -> None:
        from tensordict import NonTensorData, TensorDict  # noqa: PLC0415

        values = {"row": torch.arange(4), "stop": torch.arange(4), "run": NonTensorData(["a", "b"])}
        for more in ({}, {"input_ids": jagged()}):
            mapping = TensorDict(values | more, batch_size=[4])
            for chunk in balance_batch(mapping, 2, lengths=ROWS, meta=["run"])[0]:
                assert chunk["run"] == ["a", "b"]
            for batch in (mapping, {"inner": mapping}):
                with pytest.raises(ValueError, match="'stop' is named in meta=, and each chunk of"):
                    balance_batch(batch, 2, lengths=ROWS, meta=["stop"])
            outer = {"whole": mapping}
            for chunk in balance_batch(outer | {"row": ROWS}, 2, lengths=ROWS, meta=["whole"])[0]:
                assert chunk["whole"] is mapping


def test_a_list_is_no_batch() -> None:
    with pytest.raises(PlanError, match="no mapping of names to rows but list"):
        balance_batch([1, 2, 3], 2, lengths=[1, 2, 3])  # type: ignore[arg-type]
