"""What loss normalisation needs: a weight for every token, and one scale for the whole step.

Invariant: over all micro-batches of a step and all DP ranks, `(token_losses * loss_weights).sum()
* loss_scale` adds up (after the ranks' gradients are averaged, or summed if so configured) to the
mean over the step's loss tokens, or over its samples with loss tokens. A filler adds zero.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from rollout_dispatcher.protocol import messages as m
from rollout_workers.micro_batch.layouts import bounds


class LossNormalisation(StrEnum):
    """Over what the loss of a step is averaged."""

    TOKEN_MEAN = "token-mean"  # noqa: S105  no password
    SEQUENCE_MEAN = "sequence-mean"


class GradReduction(StrEnum):
    """What the trainer does with the ranks' gradients; DDP and FSDP average."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class LossConfig:
    """How the loss of every step of a stream is normalised.

    weights_dtype: of the weights of tokens.
    """

    dp_size: int
    normalisation: LossNormalisation = LossNormalisation.TOKEN_MEAN
    grad_reduction: GradReduction = GradReduction.MEAN
    weights_dtype: torch.dtype = torch.float32


def loss_scale(step: m.StepHeader, config: LossConfig) -> float:
    """Ranks (if their gradients are averaged) over what the step's loss is averaged over.

    A step without any loss token has the scale 0, and so no gradient.
    """
    by_token = config.normalisation is LossNormalisation.TOKEN_MEAN
    total = step.loss_tokens if by_token else step.loss_samples
    ranks = config.dp_size if config.grad_reduction is GradReduction.MEAN else 1
    return ranks / total if total else 0.0


def loss_weights(header: m.MicroBatch, mask: Tensor | None, config: LossConfig) -> Tensor:
    """Weight of every token, [total]: 1 or 0, or shares of one a sample for sequence-mean."""
    total = sum(header.tokens)
    if header.is_filler:
        return torch.zeros(total, dtype=config.weights_dtype)
    counted = _all_but_first(header.tokens) if mask is None else _as_floats(mask)
    weights = counted.to(config.weights_dtype, copy=counted is mask)
    if config.normalisation is LossNormalisation.TOKEN_MEAN:
        return weights
    share = np.maximum(header.loss_tokens, 1)
    return weights / torch.from_numpy(np.repeat(share, header.tokens))


def _all_but_first(tokens: list[int]) -> Tensor:
    """1 for every token that others of its sample come before, else 0; [total].

    End to end with others, the first would be scored by the last logits of the sample before.
    """
    ones = np.ones(sum(tokens), np.float32)
    ones[bounds(tokens)[:-1]] = 0.0
    return torch.from_numpy(ones)


def _as_floats(mask: Tensor) -> Tensor:
    """The same numbers; numpy is several times as fast with the usual kind of mask."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.from_numpy(mask.numpy().astype(np.float32))
