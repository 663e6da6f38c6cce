"""Samples that say who they are, so that a rank knows what it trains from the tensors alone.

Sample 17 of producer 2 is named "2-17" and holds the tokens c, c+1, c+2, ... with c = 2 * 10**9 +
17. A sample id that the dispatcher gave does not matter then, and bytes that got mixed up show.
Every token also carries some bytes of ballast, so that the journal has something to do.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_SPACE = 10**9
LONGEST = 48
#: In place of the name of a sample of which a rank has no token.
NOT_SENT = "?"
#: Bytes a token: a sample is up to 24 kB.
BALLAST = 512


def tokens_of(name: str) -> NDArray[np.int64]:
    """The tokens of a sample; how many follows from its name, so that a repeat is the same."""
    producer, number = map(int, name.split("-"))
    length = 1 + number * 2_654_435_761 % LONGEST
    return np.arange(length, dtype=np.int64) + (producer * _SPACE + number)


def ballast_of(tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The ballast of these tokens."""
    return np.repeat((tokens % 251).astype(np.uint8)[:, None], BALLAST, axis=1)


def name_of(tokens: NDArray[np.int64]) -> str:
    """The name of a sample; raises ValueError for tokens that are no sample's."""
    if not is_sample(tokens):
        raise ValueError(f"these are not the tokens of a sample: {tokens}")
    return _name_at(int(tokens[0]))


def is_sample(tokens: NDArray[np.int64]) -> bool:
    """Whether these are the tokens of some sample, and all of them."""
    first = int(tokens[0])
    plausible = 0 <= first < _SPACE * _SPACE
    return plausible and np.array_equal(tokens, tokens_of(_name_at(first)))


def _name_at(token: int) -> str:
    producer, number = divmod(token, _SPACE)
    return f"{producer}-{number}"


def names_of(
    tokens: NDArray[np.int64],
    lengths: Sequence[int],
    ranges: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> list[str]:
    """The names of the samples of a packed micro-batch; ranges: of each, the tokens that are there.

    Raises ValueError for tokens that are no sample's. One without any is `NOT_SENT`.
    """
    if ranges is None:
        return [name_of(part) for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    found, at = [], 0
    for own in ranges:
        places = np.concatenate([np.arange(0), *(np.arange(*each) for each in own)])
        part = tokens[at : at + len(places)]
        at += len(places)
        name = _name_at(int(part[0] - places[0])) if len(places) else NOT_SENT
        if len(places) and not np.array_equal(part, tokens_of(name)[places]):
            raise ValueError(f"these are not the tokens {own} of a sample: {part}")
        found.append(name)
    return found
