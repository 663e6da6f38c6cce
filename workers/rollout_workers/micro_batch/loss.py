"""The losses of a stream, and the trainer's reduction of their gradients.

Invariant: over all micro-batches of a step and all DP ranks, `(token_losses * weights).sum() *
scale` adds up, after the trainer has averaged, summed or divided by its options, to the formula of
the loss's normaliser. A filler adds zero.

    token-mean                every token of the step weighs the same
    token-mean-expected       every token of the run weighs the same, whatever step it is in
    sequence-mean             every sample of the step weighs the same, however long it is
    sequence-mean-token-sum   the mean over samples of the sum over their tokens
    group-mean                every group of the step weighs the same, every token within a group
    constant:C                the sum over all tokens, over a number independent of the data

Symbols in the normalisers' formulas:

    l[i,t]  loss of token t of sample i        N  samples of the step, over all DP ranks
    w[i,t]  its weight by the mask, 1 or 0     S  those of them that have any weight
    W[i]    sum over t of w[i,t]               G  groups that have any weight
    g(i)    group of sample i                  V[g]  sum of W[i] over the samples of group g

Fillers are no samples, and neither are members of groups that were dropped. All sums are over the
whole step, whatever its size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import RESERVED
from rollout_workers.micro_batch.layouts import bounds


class Share(Enum):
    """The divisor of every weight: nothing, W of its sample, or V of its sample's group."""

    NOTHING = 0
    SAMPLE = 1
    GROUP = 2


class Normaliser(NamedTuple):
    """A way to average: the loss is the sum of l * w / share, over a denominator.

    denominator: what the loss of the whole step is divided by; the step's header has N
    (`num_samples`), the sum of w (`loss_tokens`), S (`loss_samples`), and V by a group's number
    (`group_loss_tokens`). is_expected: whether it must have `expected_loss_tokens` too.
    """

    share: Share
    denominator: Callable[[m.StepHeader], float]
    is_expected: bool = False


def _expected(step: m.StepHeader) -> float:
    """N E as a whole number, which is `token-mean`'s where all samples have E."""
    assert step.expected_loss_tokens is not None, "this stream asked the dispatcher for it"
    return step.expected_loss_tokens


def _groups(step: m.StepHeader) -> float:
    """Groups that have any weight; a sample without a group is one of its own."""
    if step.group_loss_tokens is None:
        return step.loss_samples
    return sum(tokens > 0 for tokens in step.group_loss_tokens)


#: By the words that name them.
NORMALISERS = {
    # sum over i, t of w[i,t] l[i,t] / sum over i, t of w[i,t]. Long samples weigh more. DAPO;
    # verl's `token-mean`, TRL's `dapo`.
    "token-mean": Normaliser(Share.NOTHING, lambda step: step.loss_tokens),
    # sum over i, t of w[i,t] l[i,t] / (N E), E the running mean of W[i] as samples arrive. As
    # `token-mean` divides on average, but long samples that leave together weigh no less for it:
    # their step's gradient is longer instead. The dispatcher fixes E when it plans the step.
    "token-mean-expected": Normaliser(Share.NOTHING, _expected, is_expected=True),
    # 1/S sum over i of (sum over t of w[i,t] l[i,t] / W[i]). GRPO as it was published; verl's
    # `seq-mean-token-mean`; TRL's `grpo`, which counts samples without any weight too.
    "sequence-mean": Normaliser(Share.SAMPLE, lambda step: step.loss_samples),
    # 1/S sum over i, t of w[i,t] l[i,t]. A sample weighs by its length, a step does not: steps of
    # long samples have long gradients. verl's `seq-mean-token-sum`.
    "sequence-mean-token-sum": Normaliser(Share.NOTHING, lambda step: step.loss_samples),
    # 1/G sum over g of (sum over i in g, t of w[i,t] l[i,t] / V[g]). The token mean of each
    # prompt's answers, averaged over prompts. A sample without a group is one of its own. Members
    # of a group may be on any ranks; those that were dropped do not count.
    "group-mean": Normaliser(Share.GROUP, _groups),
}
#: With a positive number C behind a colon: 1/(C N) sum over i, t of w[i,t] l[i,t], C usually the
#: longest completion. Unbiased where the means above are not: how long samples are, and which of
#: their tokens count, changes nothing about the weight of others. Samples without any weight count
#: in N. Dr. GRPO; TRL's `dr_grpo`; verl's `seq-mean-token-sum-norm`, which leaves N out.
CONSTANT = "constant"
WORDS = (*NORMALISERS, f"{CONSTANT}:NUMBER")


def normaliser(option: str, word: object) -> Normaliser:
    """The normaliser that a word names; raises ConfigError that lists the words."""
    name, colon, number = str(word).partition(":")
    if name in NORMALISERS and not colon:
        return NORMALISERS[name]
    if name == CONSTANT:
        try:
            tokens = float(number)
        except ValueError:
            tokens = math.nan
        if 0 < tokens < math.inf:
            return Normaliser(Share.NOTHING, lambda step: tokens * step.num_samples)
        raise ConfigError(
            f"{option} is {word!r}; write a positive number after the colon, such as the most "
            "tokens that a completion has, as in constant:4096"
        )
    raise ConfigError(f"{option} is {word!r}; choose from {', '.join(WORDS)}")


#: The mask whose tokens the dispatcher counts; zeros and ones.
LOSS_MASK = "loss_mask"
#: The name of the main loss among those of a step: `loss_weights`, `loss_scale`.
MAIN = "loss"
MICRO_BATCHES: Literal["micro-batches"] = "micro-batches"


Choice = TypeVar("Choice", bound=StrEnum)


class GradReduction(StrEnum):
    """The trainer's reduction of the ranks' gradients; DDP and FSDP average."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class NamedLoss:
    """A loss of a step, with the name of its weights."""

    name: str
    normaliser: Normaliser

    @cached_property
    def weights(self) -> str:
        """The name of its weights in a micro-batch."""
        return f"{self.name}_weights"


@dataclass(frozen=True)
class LossConfig:
    """How the losses of every step of a stream are normalised.

    grad_ranks: ranks whose gradients the trainer averages: the DP ranks, or more of them, such as
        DP x CP. normalisation: of the main loss. others: beside it. weights_dtype: of the weights
        of tokens. divides_by: what the trainer divides each loss by on its own.
    """

    grad_ranks: int
    normalisation: Normaliser = NORMALISERS["token-mean"]
    grad_reduction: GradReduction = GradReduction.MEAN
    weights_dtype: torch.dtype = torch.float32
    others: tuple[NamedLoss, ...] = ()
    divides_by: int | Literal["micro-batches"] = 1

    @cached_property
    def losses(self) -> tuple[NamedLoss, ...]:
        """All of them, the main one first."""
        return (NamedLoss(MAIN, self.normalisation), *self.others)

    def scale(self, denominator: float, num_micro_batches: int) -> float:
        """The factor of a loss that is to be averaged over `denominator`; 0 for nothing.

        So a step without any loss token has no gradient rather than NaN.
        """
        ranks = self.grad_ranks if self.grad_reduction is GradReduction.MEAN else 1
        divided = num_micro_batches if self.divides_by == MICRO_BATCHES else self.divides_by
        return ranks * divided / denominator if denominator else 0.0


def choice(kind: type[Choice], option: str, word: str) -> Choice:
    """The member that a word names; raises ConfigError that lists the words."""
    try:
        return kind(word)
    except ValueError:
        raise ConfigError(f"{option} is {word!r}; choose from {', '.join(kind)}") from None


def named_losses(losses: Mapping[str, str]) -> tuple[NamedLoss, ...]:
    """Losses by name, as a user gives them; raises ConfigError for a name that cannot be."""
    found = []
    for name, word in losses.items():
        if not (isinstance(name, str) and name.isidentifier()) or f"{name}_weights" in RESERVED:
            raise ConfigError(
                f"a loss is called {name!r}; its weights are micro_batch.NAME_weights, so choose a "
                f"name like a variable's, and not {MAIN!r}, which is the main one's"
            )
        found.append(NamedLoss(name, normaliser(f"losses[{name!r}]", word)))
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


def loss_scales(step: m.StepHeader, config: LossConfig) -> dict[str, float]:
    """The factor of every loss of a step, by name.

    Raises ConfigError where the samples have a field of the name of a loss's weights.
    """
    for loss in config.others:
        if loss.weights in step.schema_.by_name:
            raise ConfigError(
                f"the samples have a field {loss.weights}, which is what a micro-batch calls "
                f"the weights of loss {loss.name!r}; give one of them another name"
            )
    return {
        loss.name: config.scale(loss.normaliser.denominator(step), step.num_micro_batches)
        for loss in config.losses
    }


def token_weights(
    loss: NamedLoss,
    header: m.MicroBatch,
    mask: Tensor | None,
    step: m.StepHeader,
    dtype: torch.dtype,
) -> Tensor:
    """Weight of every token, [total], as the loss's normaliser wants it.

    mask: [total], the samples' `loss_mask` without their first tokens; None where they have none.
    dtype: of the weights.
    """
    if header.is_filler:
        return torch.zeros(sum(header.tokens), dtype=dtype)
    if mask is None:
        ones = np.ones(sum(header.tokens), np.float32)
        ones[firsts(header.tokens)] = 0.0
        weights = torch.from_numpy(ones).to(dtype)
    else:
        weights = _as_weights(mask, dtype)
    if loss.normaliser.share is not Share.NOTHING:
        shares = _shares(loss, header, step)
        exact = np.float64 if dtype is torch.float64 else np.float32
        divisors = np.where(shares > 0, shares, 1.0).astype(exact)
        weights /= torch.from_numpy(np.repeat(divisors, header.tokens))
    return weights


def _shares(loss: NamedLoss, header: m.MicroBatch, step: m.StepHeader) -> NDArray[np.float64]:
    """The divisor of each sample's weights, [n]; 0 only where all of them are 0."""
    shares, groups = header.loss_tokens, step.group_loss_tokens
    by_group = loss.normaliser.share is Share.GROUP
    if by_group and groups is not None and header.group_numbers is not None:
        shares = [groups[number] for number in header.group_numbers]
    return np.array(shares, np.float64)


def firsts(tokens: Sequence[int]) -> list[int]:
    """Where the first token of each sample is, [n]; it is never a target of any loss.

    End to end with others, it would be scored by the last logits of the sample before.
    """
    return bounds(tokens)[:-1]


def _as_weights(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of this type; numpy is several times as fast with the usual kind of mask."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype, copy=True)
    floats = torch.from_numpy(mask.numpy().astype(np.float32))
    return floats if dtype is torch.float32 else floats.to(dtype)
