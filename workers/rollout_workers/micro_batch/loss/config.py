"""The losses of a stream, and what the trainer does with their gradients.

Invariant: over all micro-batches of a step and all DP ranks, `(token_losses * weights).sum() *
scale` adds up, after the trainer has averaged, summed or divided as it says, to what the loss's
normaliser says. A filler adds zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Literal, TypeVar

import torch

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.sample import RESERVED
from rollout_workers.micro_batch.loss.normalisers.base import Normaliser
from rollout_workers.micro_batch.loss.normalisers.table import normaliser
from rollout_workers.micro_batch.loss.normalisers.token_mean import TokenMean
from rollout_workers.micro_batch.loss.normalisers.token_mean_expected import TokenMeanExpected

#: The mask whose tokens the dispatcher counts; zeros and ones.
LOSS_MASK = "loss_mask"
#: The name of the main loss among those of a step: `loss_weights`, `loss_scale`.
MAIN = "loss"
MICRO_BATCHES: Literal["micro-batches"] = "micro-batches"


Choice = TypeVar("Choice", bound=StrEnum)


class GradReduction(StrEnum):
    """What the trainer does with the ranks' gradients; DDP and FSDP average."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Loss:
    """One of several losses of a step: `losses={"kl": Loss("sequence-mean", weights="kl_mask")}`.

    normalisation: over what it is averaged: `token-mean`, `token-mean-expected` (of `loss_mask`
        alone), `sequence-mean`, `sequence-mean-token-sum`, `group-mean` or `constant:NUMBER`; see
        the normalisers.
    weights: the samples' field with a number for every token, at least 0: a mask, or floats. What
        the normaliser counts is then the sum of these numbers. By default `loss_mask`, whose tokens
        the dispatcher has counted; others are totalled over the DP ranks, see `MicroBatchStream`.

    Raises ConfigError for a word that names no normaliser, or one that such weights cannot have.
    """

    normalisation: str = "token-mean"
    weights: str = LOSS_MASK

    def __post_init__(self) -> None:
        if isinstance(self.normaliser(), TokenMeanExpected) and self.weights != LOSS_MASK:
            raise ConfigError(
                f"{self.normalisation} of {self.weights}: the dispatcher knows what to expect of "
                f"{LOSS_MASK} alone; use another normalisation"
            )

    def normaliser(self) -> Normaliser:
        """The normaliser that its word names."""
        return normaliser("normalisation", self.normalisation)


@dataclass(frozen=True)
class NamedLoss:
    """A loss of a step, and what its tensors are called, worked out once."""

    name: str
    normaliser: Normaliser
    field: str = LOSS_MASK

    @cached_property
    def weights(self) -> str:
        """The name of its weights in a micro-batch."""
        return f"{self.name}_weights"

    @cached_property
    def is_counted(self) -> bool:
        """Whether the dispatcher has counted what it is averaged over."""
        return self.field == LOSS_MASK


@dataclass(frozen=True)
class LossConfig:
    """How the losses of every step of a stream are normalised.

    grad_ranks: ranks whose gradients the trainer averages: the DP ranks, or more of them, such as
        DP x CP. normalisation: of the main loss. others: beside it. weights_dtype: of the weights
        of tokens. divides_by: what the trainer divides each loss by on its own.
    """

    grad_ranks: int
    normalisation: Normaliser = field(default_factory=TokenMean)
    grad_reduction: GradReduction = GradReduction.MEAN
    weights_dtype: torch.dtype = torch.float32
    others: tuple[NamedLoss, ...] = ()
    divides_by: int | Literal["micro-batches"] = 1

    @cached_property
    def losses(self) -> tuple[NamedLoss, ...]:
        """All of them, the main one first."""
        return (NamedLoss(MAIN, self.normalisation), *self.others)

    @property
    def uncounted(self) -> tuple[NamedLoss, ...]:
        """Those that the ranks total themselves."""
        return tuple(loss for loss in self.others if not loss.is_counted)

    def scale(self, denominator: float, num_micro_batches: int) -> float:
        """The factor of a loss that is to be averaged over `denominator`; 0 for nothing.

        So a step without any loss token has no gradient rather than NaN.
        """
        ranks = self.grad_ranks if self.grad_reduction is GradReduction.MEAN else 1
        divided = num_micro_batches if self.divides_by == MICRO_BATCHES else self.divides_by
        return ranks * divided / denominator if denominator else 0.0


def loss_config(
    grad_ranks: int,
    *,
    loss_normalisation: str,
    losses: Mapping[str, Loss],
    grad_reduction: str,
    trainer_divides_by: int | str,
    weights_dtype: torch.dtype,
) -> LossConfig:
    """What a stream's options say; see `MicroBatchStream`. Raises ConfigError."""
    return LossConfig(
        grad_ranks,
        normaliser("loss_normalisation", loss_normalisation),
        choice(GradReduction, "grad_reduction", grad_reduction),
        weights_dtype,
        named_losses(losses),
        divisor(trainer_divides_by),
    )


def choice(kind: type[Choice], option: str, word: str) -> Choice:
    """The member that a word names; raises ConfigError that lists the words."""
    try:
        return kind(word)
    except ValueError:
        raise ConfigError(f"{option} is {word!r}; choose from {', '.join(kind)}") from None


def named_losses(losses: Mapping[str, Loss]) -> tuple[NamedLoss, ...]:
    """Losses by name, as a user gives them; raises ConfigError for a name that cannot be."""
    found = []
    for name, loss in losses.items():
        if not (isinstance(name, str) and name.isidentifier()) or f"{name}_weights" in RESERVED:
            raise ConfigError(
                f"a loss is called {name!r}; its weights are micro_batch.NAME_weights, so choose a "
                f"name like a variable's, and not {MAIN!r}, which is the main one's"
            )
        if not isinstance(loss, Loss):
            raise ConfigError(f"losses[{name!r}] is {loss!r}; give a Loss(...)")
        found.append(NamedLoss(name, loss.normaliser(), loss.weights))
    return tuple(found)


def divisor(given: object) -> int | Literal["micro-batches"]:
    """`trainer_divides_by` as a user gives it; raises ConfigError for anything else."""
    if given == MICRO_BATCHES:
        return MICRO_BATCHES
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given < math.inf:
        return given
    raise ConfigError(
        f"trainer_divides_by is {given!r}; it is {MICRO_BATCHES!r}, or a number of them, at least 1"
    )
