"""A received micro-batch becomes tensors: views of its payload, or copies, in the layout asked for.

A micro-batch belongs to the training loop, which may write into it by any view or array
(`labels = input_ids; labels[...] = -100`); the next iteration over the step yields the received
values again. So no tensor shares memory with a payload that is used again: where neither the layout
nor the device needs a copy anyway, the payload is copied whole. To detect changes, by arrays too,
would cost more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_dispatcher.errors import ProtocolError, StepContractError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import CU_ROWS, DType
from rollout_dispatcher.transport.memory import Memory, uninitialised
from rollout_workers.micro_batch import layouts
from rollout_workers.micro_batch.blocks import (
    ALONE,
    Blocks,
    ContextBlock,
    placed,
    sliced,
    tokens_in,
    widened,
    with_next,
)
from rollout_workers.micro_batch.delivery import Delivery
from rollout_workers.micro_batch.layouts import Collation, Placement, bounds
from rollout_workers.micro_batch.loss import (
    LOSS_MASK,
    MAIN,
    LossConfig,
    firsts,
    loss_scales,
    token_weights,
)
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.rank.held_steps import Received
from rollout_workers.rank.payload import Block

_TORCH: dict[DType, torch.dtype] = {
    item: getattr(torch, item.value) for item in DType if item is not DType.STR
}


@dataclass(frozen=True, slots=True)
class CollateConfig:
    """The options of all micro-batches of a stream.

    memory: of copies of payloads. delivery: to the device.
    sample_length_multiple: packed, each sample is padded to a multiple of so many tokens; padded,
        the longest is. packed_length: then packed ones are padded to so many tokens in all.
    blocks: those that this rank may be in; None: it trains all by itself.
    """

    loss: LossConfig
    collation: Collation = Collation.PACKED
    memory: Memory = uninitialised
    sample_length_multiple: int = 1
    packed_length: int | None = None
    delivery: Delivery = field(default_factory=Delivery)
    blocks: Blocks | None = None

    @property
    def copies(self) -> bool:
        """Whether the tensors that a trainer gets are copies by their layout or device."""
        return self.delivery.copies or self.collation is Collation.PADDED

    def block(self, header: m.MicroBatch) -> ContextBlock:
        """The block of a micro-batch. Raises ProtocolError for one that the stream cannot have."""
        size = header.cp_size or 1
        if size > 1 and size not in (self.blocks.groups if self.blocks else {}):
            raise ProtocolError(
                f"a micro-batch of {size} DP ranks, of which this rank has no group"
            )
        return self.blocks.block(size, header.cp_rank) if self.blocks else ALONE

    def placements(self, tokens: list[int], block: ContextBlock) -> tuple[Placement, Placement]:
        """Of the whole samples of a block, and of this rank's slices of them.

        Raises StepContractError if these have more than `packed_length` rows.
        """
        multiple, length = self.sample_length_multiple, self.packed_length
        if self.blocks is not None:
            whole, own = placed(tokens, block, multiple, length)
        elif self.collation is Collation.PADDED:
            whole = own = layouts.padded(tokens, multiple)
        elif self.collation is Collation.JAGGED:
            whole = own = layouts.jagged(tokens)
        else:
            whole = own = layouts.packed(tokens, multiple, length)
        if length is not None and own.rows > length:
            raise StepContractError(
                f"a micro-batch has {own.rows} tokens, padding of samples included, and the "
                f"stream was made with packed_length={length}; make it with more"
            )
        return whole, own


def collate(
    received: Received,
    step: m.StepHeader,
    config: CollateConfig,
    *,
    scales: Mapping[str, float] | None = None,
    give_away: bool = False,
) -> MicroBatch:
    """Lay a received micro-batch out as tensors. Raises ProtocolError without `input_ids`.

    scales: the factors of the step's losses by name; made of its header by default.
    give_away: it is not collated again, so that its tensors may be views of the payload.
    """
    header = received.header
    copy = not (give_away or config.copies)
    scales = scales or loss_scales(step, config.loss)
    per_token, others, text = _fields(received.copied(config.memory) if copy else received)
    if "input_ids" not in per_token:
        raise ProtocolError("the samples have no per-token field input_ids")
    block = config.block(header)
    per_token = widened(per_token, header, block, config.sample_length_multiple)
    if (mask := per_token.get(LOSS_MASK)) is not None:
        per_token[LOSS_MASK] = _without_firsts(mask, header.tokens)
    weights = {
        loss.weights: token_weights(
            loss, header, per_token.get(LOSS_MASK), step, config.loss.weights_dtype
        )
        for loss in config.loss.losses
    }
    if header.is_filler and LOSS_MASK in per_token:
        per_token[LOSS_MASK] = torch.zeros_like(per_token[LOSS_MASK])
    per_token["input_ids"] = per_token["input_ids"].long()
    if "position_ids" not in per_token:
        per_token["position_ids"] = _positions(header.tokens)
    per_token |= weights
    if config.blocks is not None:
        per_token = with_next(per_token, header.tokens)
    whole, placement = config.placements(header.tokens, block)
    if config.collation is Collation.PADDED:  # the only layout that copies what is per token alone
        others = {name: values.clone() for name, values in others.items()}
    tensors = layouts.lay_out(per_token, whole)
    tensors = sliced(tensors, frozenset(per_token), whole, block) | others
    absent = [None] * len(header.tokens)
    return MicroBatch(
        tensors=tensors,
        text=text,
        step=header.step,
        index=header.index,
        tokens=sum(header.tokens) if block.size == 1 else tokens_in(whole, block),
        loss_scale=scales[MAIN],
        loss_scales=dict(scales),
        is_last=header.index == step.num_micro_batches - 1,
        is_filler=header.is_filler,
        sample_ids=tuple(header.sample_ids),
        group_ids=tuple(header.group_ids or absent),
        policy_versions=tuple(header.policy_versions or absent),
        per_token=frozenset(per_token),
        placement=placement,
        block=block,
    )


def _without_firsts(mask: Tensor, tokens: list[int]) -> Tensor:
    """The loss mask without the first token of each sample; the very tensor if it marks none."""
    rows = firsts(tokens)
    # Many times as fast as torch is with so few; it has all types but one.
    marks = mask if mask.dtype is torch.bfloat16 else mask.numpy()
    return mask.index_fill(0, torch.tensor(rows), 0) if marks[rows].any() else mask


def _fields(
    received: Received,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Per-token tensors [total, ...] and all others, as views of the payload; and texts."""
    per_token: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    text: dict[str, tuple[str, ...]] = {}
    for block in received.blocks:
        name = block.field.name
        if block.field.per_token:
            per_token[name] = _view(block, received.payload)
        elif block.field.is_text:
            text[name] = _texts(block, received.payload)
        else:
            others[name] = _view(block, received.payload)
            if block.field.ragged:
                others[name + CU_ROWS] = torch.tensor(bounds(block.own), dtype=torch.int32)
    return per_token, others, text


def _texts(block: Block, payload: memoryview) -> tuple[str, ...]:
    """The text of each sample. Invalid UTF-8 becomes U+FFFD: nothing has checked it before, and an
    error on one rank alone would be a hang of the others.
    """
    text = payload[block.offset : block.offset + block.rows]
    each = pairwise(bounds(block.own))
    return tuple(str(text[start:stop], "utf-8", "replace") for start, stop in each)


def _view(block: Block, payload: memoryview) -> Tensor:
    dtype, is_flat = _TORCH[block.field.dtype], not block.field.shape
    if not block.rows:  # torch makes no tensor of an empty buffer
        return torch.empty(block.shape, dtype=dtype)
    count = block.rows if is_flat else block.values
    values = torch.frombuffer(payload, dtype=dtype, count=count, offset=block.offset)
    return values if is_flat else values.view(block.shape)


def _positions(tokens: list[int]) -> Tensor:
    """0, 1, 2, ... from the start of every sample, [total]."""
    count = _count_to(1 << max(tokens).bit_length())
    return torch.from_numpy(np.concatenate([count[:size] for size in tokens]))


@lru_cache(maxsize=4)
def _count_to(size: int) -> NDArray[np.int64]:
    """0, 1, ... size - 1, to be copied from; the sizes are few, as they are powers of two."""
    return np.arange(size)
