"""Two things run in turn, each first in every other pair: what the machine does falls on both.

Compared is the second's figure over the first's, as the median of the pairs, and their quartiles.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import median, quantiles
from typing import TypeVar

T = TypeVar("T")
Found = TypeVar("Found")
#: `ratio`, the median; `low` and `high`, the quartiles.
Spread = dict[str, float]


def in_turn(
    first: T, second: T, run: Callable[[T, int], Found], pairs: int
) -> Iterator[tuple[Found, Found]]:
    """What running the first and the second gave, for each pair; `run` gets the pair's number."""
    for pair in range(pairs):
        if pair % 2 == 0:
            one = run(first, pair)
            yield one, run(second, pair)
        else:
            other = run(second, pair)
            yield run(first, pair), other


def spread(ratios: Sequence[float]) -> Spread:
    """Of at least two pairs."""
    low, _, high = quantiles(ratios, n=4)
    return {"ratio": median(ratios), "low": low, "high": high}


def in_words(found: Spread, digits: int = 3) -> str:
    """The end of a row, for people."""
    ratio = f"{found['ratio']:6.{digits}f}"
    return f"{ratio}  ({found['low']:.{digits}f} to {found['high']:.{digits}f})"
