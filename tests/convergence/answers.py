"""Long answers: text whose later tokens follow rules that only long samples show.

A sample is a key and an answer; every next token follows from the one before by a table of the
key, but for a tenth, which are drawn. Lengths are those of a real trace, a built-in profile,
scaled. Behind its first 63 tokens, which one in ten goes beyond, a sample follows other tables, and
behind its first 181, which about one in a hundred does, yet others. Nothing but these teaches the
last tables, so what their tokens weigh decides how fast those are learnt.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout_dispatcher.simulate.trace import PROBABILITIES, PROFILES
from tests.convergence.policy import Policy, padded
from tests.convergence.rollouts import Rollout
from tests.convergence.task import Ints

TOKENS, KEYS = 12, 2
#: Share of tokens that follow no table.
DRAWN = 0.1
PROFILE, SCALE, SHORTEST = PROFILES["reasoning-gym"], 1 / 20, 3
#: Positions from which on the second and the third tables hold; where position ids change, too.
CHANGES = (63, 181)
#: Of the lengths' distribution; the last two overlap.
CLASSES = {"shorter nine tenths": (0, 0.9), "longest tenth": (0.9, 1), "longest 1 %": (0.99, 1)}
HELD_OUT = 64
_TABLES = np.stack(
    [np.random.default_rng(each).permutation(TOKENS) for each in range(KEYS * (len(CHANGES) + 1))]
).reshape(len(CHANGES) + 1, KEYS, TOKENS)


def lengths(quantiles: NDArray[np.float64]) -> Ints:
    """Tokens of samples at these places of the distribution."""
    found = np.interp(quantiles, PROBABILITIES, PROFILE.quantiles) * SCALE
    return np.maximum(np.rint(found), SHORTEST).astype(np.int64)


#: Tokens from which on a sample is of the longest hundredth; of the longest one.
LONG, LONGEST = lengths(np.array([0.99, 1.0])).tolist()


def first_answerer() -> Policy:
    """A policy that has learnt nothing."""
    torch.manual_seed(0)
    return Policy(TOKENS + KEYS, int(positions(LONGEST)[-1]) + 1)


def positions(tokens: int) -> Ints:
    """Position ids: two to each doubling of the position."""
    return (2 * np.log2(np.arange(tokens) + 1) + 1e-9).astype(np.int64)


def write(random: np.random.Generator, sizes: Ints) -> list[Ints]:
    """A text of each of these lengths."""
    keys = random.integers(KEYS, size=len(sizes))
    written = np.empty((len(sizes), sizes.max()), np.int64)
    written[:, 0] = keys + TOKENS
    written[:, 1:] = random.integers(TOKENS, size=(len(sizes), sizes.max() - 1))
    drawn = np.less(random.random(written.shape), DRAWN)
    for at in range(2, written.shape[1]):
        part = sum(at >= change for change in CHANGES)
        followed = _TABLES[part, keys, written[:, at - 1]]
        written[:, at] = np.where(drawn[:, at], written[:, at], followed)
    return [row[:size] for row, size in zip(written, sizes.tolist(), strict=True)]


class Answers:
    """What a seed decides on: a stream of samples, the same for every way to choose from them."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng((seed, 2))

    def write(self, count: int) -> list[Rollout]:
        """The next so many."""
        texts = write(self._random, lengths(self._random.random(count)))
        return [Rollout(fields(text), 1.0) for text in texts]


def fields(text: Ints) -> dict[str, NDArray[Any]]:
    """A text as it is pushed; the key and the first token teach nothing."""
    return {
        "input_ids": text,
        "position_ids": positions(len(text)),
        "loss_mask": np.arange(len(text)) > 1,
    }


@torch.no_grad()
def held_out(policy: Policy) -> dict[str, float]:
    """Loss a token, in nats, over texts of each class of lengths that no seed's stream has."""
    random = np.random.default_rng(2026)
    found = {}
    for name, (low, high) in CLASSES.items():
        texts = write(random, lengths(np.linspace(low, high, HELD_OUT)))
        losses = -torch.cat([_logprobs(policy, texts[at : at + 8]) for at in range(0, HELD_OUT, 8)])
        found[name] = float(losses.mean())
    return found


def _logprobs(policy: Policy, texts: Sequence[Ints]) -> Tensor:
    counted = padded([(np.arange(len(text)) > 1).astype(np.int64) for text in texts])
    places = padded([positions(len(text)) for text in texts])
    return policy.logprobs(padded(texts), places)[counted.bool()]
