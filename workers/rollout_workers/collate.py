"""Micro-batches as tensors: packed, padded or jagged, each with what loss normalisation needs.

Invariant: over all micro-batches of a step and all DP ranks, `(token_losses * loss_weights).sum()
* loss_scale` adds up (after the ranks' gradients are averaged, or summed if so configured) to the
mean over the step's loss tokens, or over its samples with loss tokens. A filler adds zero.

No tensor looks at bytes that are handed out again: a micro-batch belongs to whom it is handed to,
who may write into it, by whatever view or array (`labels = input_ids; labels[...] = -100`), and
finds what was received in the next iteration over the step. Where neither the layout nor the device
asks for a copy anyway, the payload is copied whole: to tell for certain whether it was changed, by
an array too, would cost more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import DType
from rollout_dispatcher.transport.memory import Memory, uninitialised
from rollout_workers.rank.held_steps import Received
from rollout_workers.rank.payload import Block

_TORCH: dict[DType, torch.dtype] = {item: getattr(torch, item.value) for item in DType}


class Collation(StrEnum):
    """How the tensors of a micro-batch are laid out."""

    PACKED = "packed"
    PADDED = "padded"
    JAGGED = "jagged"


class LossNormalisation(StrEnum):
    """Over what the loss of a step is averaged."""

    TOKEN_MEAN = "token-mean"  # noqa: S105  no password
    SEQUENCE_MEAN = "sequence-mean"


class GradReduction(StrEnum):
    """What the trainer does with the ranks' gradients; DDP and FSDP average."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class CollateConfig:
    """What all micro-batches of a stream have in common.

    memory: where copies of payloads go.
    """

    dp_size: int
    collation: Collation = Collation.PACKED
    loss_normalisation: LossNormalisation = LossNormalisation.TOKEN_MEAN
    grad_reduction: GradReduction = GradReduction.MEAN
    weights_dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    memory: Memory = uninitialised

    @property
    def copies(self) -> bool:
        """Whether the tensors that a trainer gets are copies by their layout or device."""
        elsewhere = self.device is not None and self.device.type != "cpu"
        return elsewhere or self.collation is Collation.PADDED


@dataclass(frozen=True)
class MicroBatch:
    """What one DP rank feeds to one forward and backward pass of `n` samples.

    tensors: every tensor by name, also reachable as `micro_batch["logprobs"]` and, unless the name
    is taken below, `micro_batch.logprobs`. Per-token tensors are [total, ...] packed,
    [n, longest, ...] padded with zeros, or nested [n, jagged, ...]; per-sample ones [n, ...].

        input_ids, position_ids  int64, per token; positions restart at 0 with every sample
        loss_weights             `weights_dtype`, per token: weight of the loss of predicting this
                                 token from those before it in its sample. By the `loss_mask`;
                                 without one the first token of each sample has weight 0
        cu_seqlens               packed and jagged: int32 [n + 1], where each sample starts
        attention_mask           padded: bool [n, longest], true on tokens

    loss_scale: factor of the summed, weighted token losses, to apply exactly once; whether it was,
        nobody can see from here. See the module's invariant.
    tokens: real tokens, without padding. max_seqlen: tokens of the longest sample.
    is_last: the step's last on this rank, where gradients are synchronised.
    is_filler: one token of no weight, so that this rank joins the others' backward pass.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    step: int
    index: int
    tokens: int
    max_seqlen: int
    loss_scale: float
    is_last: bool
    is_filler: bool
    sample_ids: tuple[str, ...]
    group_ids: tuple[str | None, ...]
    policy_versions: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getattr__(self, name: str) -> Tensor:
        tensors = self.__dict__.get("tensors", {})
        if name not in tensors:
            raise AttributeError(
                f"this micro-batch has no {name!r}; its tensors are {', '.join(tensors)}"
            )
        found: Tensor = tensors[name]
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
    weights = _loss_weights(header, per_token.get("loss_mask"), config)
    if header.is_filler and "loss_mask" in per_token:
        per_token["loss_mask"] = torch.zeros_like(per_token["loss_mask"])
    per_token["input_ids"] = per_token["input_ids"].long()
    if "position_ids" not in per_token:
        per_token["position_ids"] = _positions(header.tokens)
    per_token["loss_weights"] = weights
    tensors = _LAYOUTS[config.collation](per_token, per_sample, header.tokens)
    if config.device is not None:
        tensors = {name: item.to(config.device) for name, item in tensors.items()}
    absent = [None] * len(header.tokens)
    return MicroBatch(
        tensors=tensors,
        step=header.step,
        index=header.index,
        tokens=sum(header.tokens),
        max_seqlen=max(header.tokens),
        loss_scale=loss_scale(step, config),
        is_last=header.index == step.num_micro_batches - 1,
        is_filler=header.is_filler,
        sample_ids=tuple(header.sample_ids),
        group_ids=tuple(header.group_ids or absent),
        policy_versions=tuple(header.policy_versions or absent),
    )


def loss_scale(step: m.StepHeader, config: CollateConfig) -> float:
    """Ranks (if their gradients are averaged) over what the step's loss is averaged over.

    A step without any loss token has the scale 0, and so no gradient.
    """
    by_token = config.loss_normalisation is LossNormalisation.TOKEN_MEAN
    total = step.loss_tokens if by_token else step.loss_samples
    ranks = config.dp_size if config.grad_reduction is GradReduction.MEAN else 1
    return ranks / total if total else 0.0


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


def _loss_weights(header: m.MicroBatch, mask: Tensor | None, config: CollateConfig) -> Tensor:
    """Weight of every token, [total]: 1 or 0, or shares of one a sample for sequence-mean."""
    total = sum(header.tokens)
    if header.is_filler:
        return torch.zeros(total, dtype=config.weights_dtype)
    counted = _all_but_first(header.tokens) if mask is None else _as_floats(mask)
    weights = counted.to(config.weights_dtype, copy=counted is mask)
    if config.loss_normalisation is LossNormalisation.TOKEN_MEAN:
        return weights
    share = np.maximum(header.loss_tokens, 1)
    return weights / torch.from_numpy(np.repeat(share, header.tokens))


def _all_but_first(tokens: list[int]) -> Tensor:
    """1 for every token that others of its sample come before, else 0; [total].

    End to end with others, the first would be scored by the last logits of the sample before.
    """
    ones = np.ones(sum(tokens), np.float32)
    ones[_bounds(tokens)[:-1]] = 0.0
    return torch.from_numpy(ones)


def _as_floats(mask: Tensor) -> Tensor:
    """The same numbers; numpy is several times as fast with the usual kind of mask."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.from_numpy(mask.numpy().astype(np.float32))


def _positions(tokens: list[int]) -> Tensor:
    """0, 1, 2, ... from the start of every sample, [total]."""
    count = _count_to(1 << max(tokens).bit_length())
    return torch.from_numpy(np.concatenate([count[:size] for size in tokens]))


@lru_cache(maxsize=4)
def _count_to(size: int) -> NDArray[np.int64]:
    """0, 1, ... size - 1, to be copied from; the sizes are few, as they are powers of two."""
    return np.arange(size)


def _bounds(tokens: list[int]) -> list[int]:
    return [0, *accumulate(tokens)]


Tensors = dict[str, Tensor]


def _packed(per_token: Tensors, per_sample: Tensors, tokens: list[int]) -> Tensors:
    bounds = torch.from_numpy(np.array(_bounds(tokens), np.int32))
    return {**per_token, "cu_seqlens": bounds, **per_sample}


def _padded(per_token: Tensors, per_sample: Tensors, tokens: list[int]) -> Tensors:
    lengths, longest = torch.tensor(tokens), max(tokens)
    mask = torch.arange(longest) < lengths[:, None]
    found = {}
    for name, values in per_token.items():
        found[name] = values.new_zeros((len(tokens), longest, *values.shape[1:]))
        found[name][mask] = values
    return {
        "attention_mask": mask,
        **found,
        **{name: values.clone() for name, values in per_sample.items()},
    }


def _jagged(per_token: Tensors, per_sample: Tensors, tokens: list[int]) -> Tensors:
    offsets = torch.tensor(_bounds(tokens))
    found = {
        name: torch.nested.nested_tensor_from_jagged(
            values, offsets, min_seqlen=min(tokens), max_seqlen=max(tokens)
        )
        for name, values in per_token.items()
    }
    return {**found, "cu_seqlens": offsets.int(), **per_sample}


_LAYOUTS: dict[Collation, Callable[[Tensors, Tensors, list[int]], Tensors]] = {
    Collation.PACKED: _packed,
    Collation.PADDED: _padded,
    Collation.JAGGED: _jagged,
}
