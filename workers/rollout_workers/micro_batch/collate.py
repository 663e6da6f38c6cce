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

from rollout_dispatcher.errors import ConfigError, ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType
from rollout_dispatcher.transport.memory import Memory, uninitialised
from rollout_workers.micro_batch.layouts import LAYOUTS, Collation
from rollout_workers.micro_batch.loss import LossConfig, loss_scale, loss_weights
from rollout_workers.micro_batch.micro_batch import MicroBatch
from rollout_workers.rank.held_steps import Received
from rollout_workers.rank.payload import Block

_TORCH: dict[DType, torch.dtype] = {item: getattr(torch, item.value) for item in DType}


#: Tensors that are made where the samples do not have them.
_MADE = frozenset({"position_ids", "loss_weights"})


@dataclass(frozen=True, slots=True)
class CollateConfig:
    """What all micro-batches of a stream have in common.

    memory: where copies of payloads go.
    fields: names of the tensors to make, beside what the layout adds; None for all there are.
    """

    loss: LossConfig
    collation: Collation = Collation.PACKED
    device: torch.device | None = None
    memory: Memory = uninitialised
    fields: frozenset[str] | None = None

    def wants(self, name: str) -> bool:
        """Whether to make the tensor of this name."""
        return self.fields is None or name in self.fields

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
    chosen = _chosen(received, config)
    per_token, per_sample = _fields(chosen.copied(config.memory) if copy else chosen)
    if config.wants("loss_weights"):
        source = per_token if config.fields is None else _fields(received)[0]
        per_token["loss_weights"] = loss_weights(header, source.get("loss_mask"), config.loss)
    if header.is_filler and "loss_mask" in per_token:
        per_token["loss_mask"] = torch.zeros_like(per_token["loss_mask"])
    if config.wants("input_ids"):
        per_token["input_ids"] = per_token["input_ids"].long()
    if "position_ids" not in per_token and config.wants("position_ids"):
        per_token["position_ids"] = _positions(header.tokens)
    tensors = LAYOUTS[config.collation](per_token, per_sample, header.tokens)
    if config.device is not None:
        tensors = {name: item.to(config.device) for name, item in tensors.items()}
    absent = [None] * len(header.tokens)
    return MicroBatch(
        tensors=tensors,
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


def _chosen(received: Received, config: CollateConfig) -> Received:
    """What is wanted of it. Raises ProtocolError without `input_ids`, ConfigError for a name that
    nothing has.
    """
    names = {block.field.name for block in received.blocks}
    if "input_ids" not in names:
        raise ProtocolError("the samples have no per-token field input_ids")
    if config.fields is None:
        return received
    if unknown := config.fields - names - _MADE:
        raise ConfigError(
            f"fields names {', '.join(sorted(unknown))}, and there is {', '.join(sorted(names))} "
            f"in the samples, and {', '.join(sorted(_MADE))} made of them"
        )
    return received.only(config.fields)


def _fields(received: Received) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Per-token tensors [total, ...] and per-sample tensors [n, ...]: views of the payload."""
    per_token: dict[str, Tensor] = {}
    per_sample: dict[str, Tensor] = {}
    for block in received.blocks:
        home = per_token if block.field.per_token else per_sample
        home[block.field.name] = _view(block, received.payload)
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
