"""A received micro-batch becomes tensors: views of its payload, or copies, in the layout asked for.

No tensor looks at bytes that are handed out again: a micro-batch belongs to whom it is handed to,
who may write into it, by whatever view or array (`labels = input_ids; labels[...] = -100`), and
finds what was received in the next iteration over the step. Where neither the layout nor the device
asks for a copy anyway, the payload is copied whole: to tell for certain whether it was changed, by
an array too, would cost more.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_dispatcher.errors import ProtocolError, StepContractError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType
from rollout_dispatcher.transport.memory import Memory, uninitialised
from rollout_workers.micro_batch import layouts
from rollout_workers.micro_batch.delivery import Delivery, InPlace
from rollout_workers.micro_batch.layouts import Collation, Placement
from rollout_workers.micro_batch.loss import LossConfig, loss_scale, loss_weights
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.rank.held_steps import Received
from rollout_workers.rank.payload import Block

_TORCH: dict[DType, torch.dtype] = {item: getattr(torch, item.value) for item in DType}


@dataclass(frozen=True, slots=True)
class CollateConfig:
    """What all micro-batches of a stream have in common.

    memory: where copies of payloads go. delivery: where micro-batches go.
    sample_length_multiple: packed, each sample is padded to a multiple of so many tokens; padded,
        the longest is. packed_length: then packed ones are padded to so many tokens in all.
    """

    loss: LossConfig
    collation: Collation = Collation.PACKED
    memory: Memory = uninitialised
    sample_length_multiple: int = 1
    packed_length: int | None = None
    delivery: Delivery = field(default_factory=InPlace)

    @property
    def copies(self) -> bool:
        """Whether the tensors that a trainer gets are copies by their layout or device."""
        return self.delivery.copies or self.collation is Collation.PADDED

    def placement(self, tokens: list[int]) -> Placement:
        """Where samples of so many tokens lie. Raises StepContractError if they are too many."""
        match self.collation:
            case Collation.PADDED:
                return layouts.padded(tokens, self.sample_length_multiple)
            case Collation.JAGGED:
                return layouts.jagged(tokens)
        found = layouts.packed(tokens, self.sample_length_multiple, self.packed_length)
        if self.packed_length is not None and found.rows > self.packed_length:
            raise StepContractError(
                f"a micro-batch has {found.rows} tokens, padding of samples included, and the "
                f"stream was made with packed_length={self.packed_length}; make it with more"
            )
        return found


def collate(
    received: Received, step: m.StepHeader, config: CollateConfig, *, give_away: bool = False
) -> MicroBatch:
    """Lay a received micro-batch out as tensors. Raises ProtocolError without `input_ids`.

    give_away: nobody asks for it again, so that its tensors may look at what was received.
    """
    header = received.header
    copy = not (give_away or config.copies)
    per_token, per_sample = _fields(received.copied(config.memory) if copy else received)
    weights = loss_weights(header, per_token.get("loss_mask"), config.loss)
    if header.is_filler and "loss_mask" in per_token:
        per_token["loss_mask"] = torch.zeros_like(per_token["loss_mask"])
    per_token["input_ids"] = per_token["input_ids"].long()
    if "position_ids" not in per_token:
        per_token["position_ids"] = _positions(header.tokens)
    per_token["loss_weights"] = weights
    placement = config.placement(header.tokens)
    if config.collation is Collation.PADDED:  # the only layout that copies what is per token alone
        per_sample = {name: values.clone() for name, values in per_sample.items()}
    tensors = layouts.lay_out(per_token, placement) | per_sample
    absent = [None] * len(header.tokens)
    return MicroBatch(
        tensors=tensors,
        step=header.step,
        index=header.index,
        tokens=sum(header.tokens),
        loss_scale=loss_scale(step, config.loss),
        is_last=header.index == step.num_micro_batches - 1,
        is_filler=header.is_filler,
        sample_ids=tuple(header.sample_ids),
        group_ids=tuple(header.group_ids or absent),
        policy_versions=tuple(header.policy_versions or absent),
        per_token=frozenset(per_token),
        placement=placement,
    )


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
