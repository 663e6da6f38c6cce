"""Micro-batches as tensors, and the normalisation that makes the gradient one big batch's."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.sample import DType, Field, Sample, Schema
from rollout_workers.micro_batch.collate import CollateConfig, collate
from rollout_workers.micro_batch.layouts import Collation
from rollout_workers.micro_batch.loss import LossConfig
from rollout_workers.micro_batch.micro_batch import MicroBatch
from tests.workers.micro_batch.batches import HEADER, TWO, batch, received
from tests.workers.support.peers import micro_batch, sample


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


@pytest.mark.parametrize("layout", list(Collation))
def test_what_is_written_into_a_tensor_is_not_in_the_next_hand_out(layout: Collation) -> None:
    frame, config = received(micro_batch(3, 0, *TWO)), CollateConfig(LossConfig(2), layout)
    first, expected = (plain(collate(frame, HEADER, config)) for _ in range(2))
    for tensor in first.values():
        change(tensor)
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


def test_an_unknown_tensor_names_those_there_are() -> None:
    with pytest.raises(AttributeError, match="no 'logprobs'; its tensors are input_ids, loss_mask"):
        _ = batch(*TWO).logprobs


def test_a_sample_without_input_ids_is_the_peers_fault() -> None:
    frame = received(micro_batch(3, 0, sample([1])))
    blocks = [block for block in frame.blocks if block.field.name != "input_ids"]
    with pytest.raises(ProtocolError, match="no per-token field input_ids"):
        collate(frame._replace(blocks=blocks), HEADER, CollateConfig(LossConfig(2)))
