"""A received micro-batch becomes tensors: views of its payload, or copies, in the layout asked for.

No tensor looks at bytes that are handed out again: a micro-batch belongs to whom it is handed to,
who may write into it, by whatever view or array (`labels = input_ids; labels[...] = -100`), and
finds what was received in the next iteration over the step. Where neither the layout nor the device
asks for a copy anyway, the payload is copied whole: to tell for certain whether it was changed, by
an array too, would cost more.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import CU_ROWS, DType
from rollout_dispatcher.transport.memory import Memory, uninitialised
from rollout_workers.micro_batch.layouts import LAYOUTS, Collation, bounds
from rollout_workers.micro_batch.loss import LossConfig, loss_scale, loss_weights
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.rank.held_steps import Received
from rollout_workers.rank.payload import Block

_TORCH: dict[DType, torch.dtype] = {
    item: getattr(torch, item.value) for item in DType if item is not DType.STR
}


@dataclass(frozen=True, slots=True)
class CollateConfig:
    """What all micro-batches of a stream have in common.

    memory: where copies of payloads go.
    """

    loss: LossConfig
    collation: Collation = Collation.PACKED
    device: torch.device | None = None
    memory: Memory = uninitialised

    @property
    def copies(self) -> bool:
        """Whether the tensors that a trainer gets are copies by their layout or device."""
        elsewhere = self.device is not None and self.device.type != "cpu"
        return elsewhere or self.collation is Collation.PADDED


def collate(
    received: Received, step: m.StepHeader, config: CollateConfig, *, give_away: bool = False
) -> MicroBatch:
    """Lay a received micro-batch out as tensors. Raises ProtocolError without `input_ids`.

    give_away: nobody asks for it again, so that its tensors may look at what was received.
    """
    header = received.header
    copy = not (give_away or config.copies)
    per_token, others, text = _fields(received.copied(config.memory) if copy else received)
    weights = loss_weights(header, per_token.get("loss_mask"), config.loss)
    if header.is_filler and "loss_mask" in per_token:
        per_token["loss_mask"] = torch.zeros_like(per_token["loss_mask"])
    per_token["input_ids"] = per_token["input_ids"].long()
    if "position_ids" not in per_token:
        per_token["position_ids"] = _positions(header.tokens)
    per_token["loss_weights"] = weights
    tensors = LAYOUTS[config.collation](per_token, others, header.tokens)
    if config.device is not None:
        tensors = {name: item.to(config.device) for name, item in tensors.items()}
    absent = [None] * len(header.tokens)
    return MicroBatch(
        tensors=tensors,
        text=text,
        step=header.step,
        index=header.index,
        tokens=sum(header.tokens),
        max_seqlen=max(header.tokens),
        loss_scale=loss_scale(step, config.loss),
        is_last=header.index == step.num_micro_batches - 1,
        is_filler=header.is_filler,
        sample_ids=tuple(header.sample_ids),
        group_ids=tuple(header.group_ids or absent),
        policy_versions=tuple(header.policy_versions or absent),
    )


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
    if "input_ids" not in per_token:
        raise ProtocolError("the samples have no per-token field input_ids")
    return per_token, others, text


def _texts(block: Block, payload: memoryview) -> tuple[str, ...]:
    """The text of each sample. What is no UTF-8 becomes U+FFFD: nobody checks it on its way, and on
    one rank alone it would be no error but a hang.
    """
    text = payload[block.offset : block.offset + block.rows]
    each = pairwise(bounds(block.own))
    return tuple(str(text[start:stop], "utf-8", "replace") for start, stop in each)


def _view(block: Block, payload: memoryview) -> Tensor:
    if not block.rows:  # torch makes no tensor of an empty buffer
        return torch.empty(block.shape, dtype=_TORCH[block.field.dtype])
    values = torch.frombuffer(
        payload, dtype=_TORCH[block.field.dtype], count=block.values, offset=block.offset
    )
    return values.view(block.shape) if block.field.shape else values


def _positions(tokens: list[int]) -> Tensor:
    """0, 1, 2, ... from the start of every sample, [total]."""
    count = _count_to(1 << max(tokens).bit_length())
    return torch.from_numpy(np.concatenate([count[:size] for size in tokens]))


@lru_cache(maxsize=4)
def _count_to(size: int) -> NDArray[np.int64]:
    """0, 1, ... size - 1, to be copied from; the sizes are few, as they are powers of two."""
    return np.arange(size)
