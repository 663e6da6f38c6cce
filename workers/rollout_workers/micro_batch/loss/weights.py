"""Weights: what a loss's field says of each token, and its sums."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.protocol import messages as m
from rollout_workers.micro_batch.layouts import bounds
from rollout_workers.micro_batch.loss.config import LossConfig, NamedLoss
from rollout_workers.micro_batch.loss.normalisers.base import FloatArray, Share, Totals


def token_weights(
    loss: NamedLoss, header: m.MicroBatch, values: Tensor | None, totals: Totals, config: LossConfig
) -> Tensor:
    """Weight of every token, [total], as the loss's normaliser wants it.

    values: [total], what the loss's field says; None where samples have no `loss_mask`.
    """
    if header.is_filler:
        return torch.zeros(sum(header.tokens), dtype=config.weights_dtype)
    if values is None:
        weights = torch.ones(sum(header.tokens), dtype=config.weights_dtype)
    else:
        weights = _as_weights(values, config.weights_dtype)
    weights[firsts(header.tokens)] = 0
    if loss.normaliser.share is not Share.NOTHING:
        shares = _shares(loss, header, values, totals)
        exact = np.float64 if config.weights_dtype is torch.float64 else np.float32
        divisors = np.where(shares > 0, shares, 1.0).astype(exact)
        weights /= torch.from_numpy(np.repeat(divisors, header.tokens))
    return weights


def _shares(
    loss: NamedLoss, header: m.MicroBatch, values: Tensor | None, totals: Totals
) -> FloatArray:
    """What the weights of each sample are divided by, [n]; 0 only where all of them are 0."""
    by_group = loss.normaliser.share is Share.GROUP
    if by_group and totals.groups is not None and header.group_numbers is not None:
        return totals.groups[header.group_numbers]
    if loss.is_counted or values is None:
        return np.array(header.loss_tokens, np.float64)
    return sample_weights(loss, header, values)


def sample_weights(loss: NamedLoss, header: m.MicroBatch, values: Tensor) -> FloatArray:
    """The sum of the weights of each sample but for its first token's, float64[n].

    Raises SampleRefused that names the sample where a weight is negative or no number.
    """
    numbers = values.to(torch.float64, copy=True).numpy()
    if not (numbers >= 0).all() or np.isinf(numbers).any():
        at = int(np.flatnonzero(~(numbers >= 0) | np.isinf(numbers))[0])
        sample, token = _place(header.tokens, at)
        raise SampleRefused(
            "bad-weights",
            f"{loss.field} of sample {header.sample_ids[sample]} is {numbers[at]:g} at token "
            f"{token}; the weights of loss {loss.name} are numbers from 0 on",
        )
    numbers[firsts(header.tokens)] = 0
    found: FloatArray = np.add.reduceat(numbers, bounds(header.tokens)[:-1])
    return found


def _place(tokens: Sequence[int], at: int) -> tuple[int, int]:
    """Which sample, and which of its tokens, stands at a place of them all."""
    starts = bounds(list(tokens))
    sample = int(np.searchsorted(starts, at, side="right")) - 1
    return sample, at - starts[sample]


def firsts(tokens: Sequence[int]) -> list[int]:
    """Where the first token of each sample is, [n]; it is never a target of any loss.

    End to end with others, it would be scored by the last logits of the sample before.
    """
    return bounds(tokens)[:-1]


def _as_weights(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of this type; numpy is several times as fast with the usual kind of mask."""
    if values.dtype is not torch.bool:
        return values.to(dtype, copy=True)
    floats = torch.from_numpy(values.numpy().astype(np.float32))
    return floats if dtype is torch.float32 else floats.to(dtype)
