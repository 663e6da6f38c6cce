"""Micro-batches as tensors, and the normalisation that makes the gradient one big batch's."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.sample import DType, Field, Sample, Schema
from rollout_workers.micro_batch.collate import CollateConfig, collate
from rollout_workers.micro_batch.layouts import Collation
from rollout_workers.micro_batch.loss import LossConfig, normaliser
from rollout_workers.micro_batch.micro_batch import MicroBatch
from tests.workers.micro_batch.batches import HEADER, TWO, batch, received
from tests.workers.support.peers import micro_batch, sample, unmasked

SEQUENCE = CollateConfig(LossConfig(2, normaliser("", "sequence-mean")))
LISTS = st.lists(st.integers(0, 99), min_size=1, max_size=7)


def test_packed_is_one_row_and_where_each_sample_starts() -> None:
    packed = batch(*TWO)
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert (packed.cu_seqlens.tolist(), packed.cu_seqlens.dtype) == ([0, 3, 5], torch.int32)
    assert (packed.max_seqlen, packed.tokens, packed.num_samples) == (3, 5, 2)
    assert packed.loss_mask.tolist() == [False, True, True, False, True]
    assert packed["reward"].tolist() == [18.0, 17.0]
    assert packed.sample_ids == ("a", "b")
    assert packed.group_ids == (None, None)
    assert packed.policy_versions == (1, 1)


def test_padded_has_a_row_a_sample_and_zeros_behind() -> None:
    padded = batch(*TWO, config=CollateConfig(LossConfig(2), Collation.PADDED))
    assert padded.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert padded.attention_mask.tolist() == [[True] * 3, [True, True, False]]
    assert padded.position_ids.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert padded.loss_weights.tolist() == [[0, 1, 1], [0, 1, 0]]
    assert padded.reward.shape == (2,)
    assert "cu_seqlens" not in padded


def test_jagged_is_a_nested_tensor_with_the_same_rows() -> None:
    jagged = batch(*TWO, config=CollateConfig(LossConfig(2), Collation.JAGGED))
    assert jagged.input_ids.layout is torch.jagged
    assert [row.tolist() for row in jagged.input_ids.unbind()] == [[5, 6, 7], [8, 9]]
    assert [row.tolist() for row in jagged.loss_weights.unbind()] == [[0, 1, 1], [0, 1]]


#: Everything that one can make of a tensor in order to write into it.
ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "the tensor": lambda tensor: tensor,
    "a slice": lambda tensor: tensor[:2],
    "a view": lambda tensor: tensor.view(-1),
    "detached": lambda tensor: tensor.detach(),
    "its data": lambda tensor: tensor.data,
    "an array": lambda tensor: torch.from_numpy(tensor.numpy()[:1]),
    "dlpack": from_dlpack,
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("layout", list(Collation))
def test_what_is_written_into_a_tensor_is_not_in_the_next_hand_out(
    layout: Collation, alias: Callable[[Tensor], Tensor]
) -> None:
    frame, config = received(micro_batch(3, 0, *TWO)), CollateConfig(LossConfig(2), layout)
    first, expected = (plain(collate(frame, HEADER, config)) for _ in range(2))
    for tensor in first.values():
        change(alias(tensor))
    second = plain(collate(frame, HEADER, config))
    for name, tensor in second.items():
        assert torch.equal(tensor, expected[name]), name
        assert not torch.equal(tensor, first[name]), name


def change(tensor: Tensor) -> None:
    """Write another value over every one."""
    tensor.logical_not_() if tensor.dtype is torch.bool else tensor.add_(1)


def plain(found: MicroBatch) -> dict[str, Tensor]:
    """All tensors; of nested ones their values."""
    return {n: t.values() if t.is_nested else t for n, t in found.tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_are_changed_leave_a_mask_of_the_same_type(dtype: torch.dtype) -> None:
    """For example weights that are multiplied by advantages in place."""
    schema = Schema(
        (Field("input_ids", DType.INT64), Field("loss_mask", DType(str(dtype).split(".")[1])))
    )
    mask = torch.ones(2, dtype=dtype)
    span = np.array([5, 6]).tobytes() + mask.numpy().tobytes().ljust(16, b"\0")
    one = Sample("s", 2, 1, schema, memoryview(span[: schema.nbytes(2)]))
    found = batch(one, config=CollateConfig(LossConfig(2, weights_dtype=dtype)))
    found.loss_weights.mul_(7)
    assert found.loss_mask.tolist() == [0, 1]


@pytest.mark.parametrize("layout", list(Collation))
@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [("token-mean", [0, 1, 1, 0, 0, 1]), ("sequence-mean", [0, 0.5, 0.5, 0, 0, 1])],
)
def test_without_a_mask_the_first_token_of_a_sample_weighs_nothing(
    layout: Collation, normalisation: str, expected: list[float]
) -> None:
    """Nothing in its sample predicts it; end to end it would be scored by the sample before."""
    config = CollateConfig(LossConfig(2, normaliser("", normalisation)), layout)
    samples = [unmasked(ids) for ids in ([5, 6, 7], [8], [9, 1])]
    weights = batch(*samples, config=config).loss_weights
    match layout:
        case Collation.PACKED:
            assert weights.tolist() == expected
        case Collation.JAGGED:
            assert weights.values().tolist() == expected
        case Collation.PADDED:
            rows = [expected[:3], [expected[3], 0, 0], [*expected[4:], 0]]
            assert weights.tolist() == rows


def test_an_unknown_tensor_names_those_there_are() -> None:
    with pytest.raises(AttributeError, match="no 'logprobs'; its tensors are input_ids, loss_mask"):
        _ = batch(*TWO).logprobs


def test_a_sample_without_input_ids_is_the_peers_fault() -> None:
    frame = received(micro_batch(3, 0, sample([1])))
    blocks = [block for block in frame.blocks if block.field.name != "input_ids"]
    with pytest.raises(ProtocolError, match="no per-token field input_ids"):
        collate(frame._replace(blocks=blocks), HEADER, CollateConfig(LossConfig(2)))


@given(st.lists(LISTS, min_size=1, max_size=5))
def test_padded_and_jagged_hold_what_packed_holds(lists: list[list[int]]) -> None:
    samples = [sample(ids, [token % 2 for token in ids]) for ids in lists]
    packed, padded, jagged = (
        batch(*samples, config=dataclasses.replace(SEQUENCE, collation=layout))
        for layout in (Collation.PACKED, Collation.PADDED, Collation.JAGGED)
    )
    for name in ("input_ids", "position_ids", "loss_weights", "loss_mask"):
        assert padded[name][padded.attention_mask].tolist() == packed[name].tolist()
        assert jagged[name].values().tolist() == packed[name].tolist()
        assert not padded[name][~padded.attention_mask].any()


@pytest.mark.parametrize("config", [{"collation": Collation.PADDED}, {"sample_length_multiple": 4}])
def test_labels_of_padding_are_those_that_no_loss_counts(config: dict[str, Any]) -> None:
    found = batch(*TWO, config=CollateConfig(LossConfig(2), **config))
    for one in (found, found.as_packed().as_padded(side="left")):
        ids, labels = one.input_ids.flatten(), one.labels.flatten()
        assert labels[labels != -100].tolist() == [6, 7, 9]
        assert torch.equal(ids[labels != -100], labels[labels != -100])
