"""A received micro-batch becomes tensors: views of its payload, or copies, in the layout asked for.

No tensor looks at bytes that are handed out again: a micro-batch belongs to whom it is handed to,
who may write into it, by whatever view or array (`labels = input_ids; labels[...] = -100`), and
finds what was received in the next iteration over the step. Where neither the layout nor the device
asks for a copy anyway, the payload is copied whole: to tell for certain whether it was changed, by
an array too, would cost more.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType
from rollout_dispatcher.transport.memory import Memory, uninitialised
from rollout_workers.micro_batch.layouts import LAYOUTS, Collation
from rollout_workers.micro_batch.loss.config import MAIN, LossConfig
from rollout_workers.micro_batch.loss.totals import StepTotals
from rollout_workers.micro_batch.loss.weights import token_weights
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.rank.held_steps import Received
from rollout_workers.rank.payload import Block

_TORCH: dict[DType, torch.dtype] = {item: getattr(torch, item.value) for item in DType}


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
    received: Received,
    step: m.StepHeader,
    config: CollateConfig,
    *,
    totals: StepTotals | None = None,
    give_away: bool = False,
) -> MicroBatch:
    """Lay a received micro-batch out as tensors. Raises ProtocolError without `input_ids`.

    totals: of the step, if some of them are not in its header.
    give_away: nobody asks for it again, so that its tensors may look at what was received.
    """
    header = received.header
    copy = not (give_away or config.copies)
    per_token, per_sample = _fields(received.copied(config.memory) if copy else received)
    totals = totals or StepTotals(step, config.loss)
    weights = {
        loss.weights: token_weights(
            loss, header, per_token.get(loss.field), totals[loss], config.loss
        )
        for loss in totals.losses
    }
    if header.is_filler:
        for loss in totals.losses:
            if loss.field in per_token:
                per_token[loss.field] = torch.zeros_like(per_token[loss.field])
    per_token["input_ids"] = per_token["input_ids"].long()
    if "position_ids" not in per_token:
        per_token["position_ids"] = _positions(header.tokens)
    per_token |= weights
    tensors = LAYOUTS[config.collation](per_token, per_sample, header.tokens)
    if config.device is not None:
        tensors = {name: item.to(config.device) for name, item in tensors.items()}
    scales = totals.scales
    absent = [None] * len(header.tokens)
    return MicroBatch(
        tensors=tensors,
        step=header.step,
        index=header.index,
        tokens=sum(header.tokens),
        max_seqlen=max(header.tokens),
        loss_scale=scales[MAIN],
        loss_scales=dict(scales),
        is_last=header.index == step.num_micro_batches - 1,
        is_filler=header.is_filler,
        sample_ids=tuple(header.sample_ids),
        group_ids=tuple(header.group_ids or absent),
        policy_versions=tuple(header.policy_versions or absent),
    )


def field_of(received: Received, name: str) -> Tensor:
    """The values of one per-token field, [total, ...]: a view of the payload."""
    block = next(block for block in received.blocks if block.field.name == name)
    return _view(block, received.payload)


def _fields(received: Received) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Per-token tensors [total, ...] and per-sample tensors [n, ...]: views of the payload."""
    per_token: dict[str, Tensor] = {}
    per_sample: dict[str, Tensor] = {}
    for block in received.blocks:
        home = per_token if block.field.per_token else per_sample
        home[block.field.name] = _view(block, received.payload)
    if "input_ids" not in per_token:
        raise ProtocolError("the samples have no per-token field input_ids")
    return per_token, per_sample


def _view(block: Block, payload: memoryview) -> Tensor:
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
