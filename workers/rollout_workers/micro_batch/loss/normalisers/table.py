"""Normalisers by the words that name them."""

import math

from rollout_dispatcher.errors import ConfigError
from rollout_workers.micro_batch.loss.normalisers.base import Normaliser
from rollout_workers.micro_batch.loss.normalisers.constant import Constant
from rollout_workers.micro_batch.loss.normalisers.group_mean import GroupMean
from rollout_workers.micro_batch.loss.normalisers.sequence_mean import SequenceMean
from rollout_workers.micro_batch.loss.normalisers.sequence_mean_token_sum import (
    SequenceMeanTokenSum,
)
from rollout_workers.micro_batch.loss.normalisers.token_mean import TokenMean
from rollout_workers.micro_batch.loss.normalisers.token_mean_expected import TokenMeanExpected

#: Those that a word alone names.
NORMALISERS: dict[str, type[Normaliser]] = {
    "token-mean": TokenMean,
    "token-mean-expected": TokenMeanExpected,
    "sequence-mean": SequenceMean,
    "sequence-mean-token-sum": SequenceMeanTokenSum,
    "group-mean": GroupMean,
}
#: Those that take a positive number, behind a colon.
WITH_NUMBER = {"constant": Constant}
WORDS = (*NORMALISERS, *(f"{word}:NUMBER" for word in WITH_NUMBER))


def normaliser(option: str, word: object) -> Normaliser:
    """The normaliser that a word names; raises ConfigError that lists the words."""
    name, colon, number = str(word).partition(":")
    if name in NORMALISERS and not colon:
        return NORMALISERS[name]()
    if name in WITH_NUMBER:
        return WITH_NUMBER[name](_number(option, word, number))
    raise ConfigError(f"{option} is {word!r}; choose from {', '.join(WORDS)}")


def _number(option: str, word: object, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(
            f"{option} is {word!r}; behind the colon stands a positive number, such as the most "
            "tokens that a completion has, as in constant:4096"
        )
    return found
