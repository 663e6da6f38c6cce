"""The task: add two numbers of 1 to 6 digits to base 5, writing each digit's step out.

Digits come lowest first. A problem of d digits is a prompt of 2d + 2 tokens,
`a0 a1 ... + b0 b1 ... =`, and one right chain of 4d + 1: for each digit `a b sum carry`, then the
end. The reward is 1 for exactly that chain, else 0: so its expectation over all that a policy may
write is the probability of one text, which one forward pass tells without any sampling.

Problems have as many digits as draws of a geometric distribution: few are long, as rollouts are.
Longer ones are harder: there is more to get wrong, and `demonstration` tires, so that the first
policy breaks many long chains off. Of one problem's chains the right ones are the longest.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: A tiny model learns the sums of 5 * 5 digits, with and without a carry, in a minute.
BASE, MAX_DIGITS = 5, 6
PLUS, EQUALS, END, VOCABULARY = BASE, BASE + 1, BASE + 2, BASE + 3
#: Each problem has one digit more than this share of those before.
LONGER = 0.85
DIGIT_SHARES = LONGER ** np.arange(MAX_DIGITS) / (LONGER ** np.arange(MAX_DIGITS)).sum()
#: A demonstration's chance to get a digit wrong, and, once it is tired, to stop before one.
SLIP, STOP, TIRED_AFTER = 0.12, 0.7, 5
#: Tokens of a chain at which it is cut off.
MAX_CHAIN = 4 * MAX_DIGITS + 1
MAX_TOKENS = 2 * MAX_DIGITS + 2 + MAX_CHAIN
#: Positions: of the digits of a, of b, of the two signs, and of the chain.
POSITIONS = 2 * MAX_DIGITS + 2 + MAX_CHAIN

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Problem:
    """Two numbers, int64[d] each, lowest digit first."""

    a: Ints
    b: Ints

    @property
    def digits(self) -> int:
        """How many each number has."""
        return len(self.a)

    @property
    def prompt(self) -> Ints:
        """int64[2d + 2]."""
        return np.concatenate([self.a, [PLUS], self.b, [EQUALS]])

    @property
    def chain(self) -> Ints:
        """The right one, int64[4d + 1]."""
        return np.append(self.steps().ravel(), END)

    def steps(self) -> Ints:
        """int64[d, 4]: both digits, their sum's digit, and what is carried."""
        rows, carry = [], 0
        for a, b in zip(self.a.tolist(), self.b.tolist(), strict=True):
            carry, digit = divmod(a + b + carry, BASE)
            rows.append((a, b, digit, carry))
        return np.array(rows)


def problem(random: np.random.Generator, digits: int | None = None) -> Problem:
    """One with so many digits, or as many as chance will have it."""
    size = digits or 1 + int(random.choice(MAX_DIGITS, p=DIGIT_SHARES))
    return Problem(random.integers(BASE, size=size), random.integers(BASE, size=size))


def demonstration(asked: Problem, random: np.random.Generator) -> Ints:
    """A chain as someone careless writes it; what the first policy learns from."""
    written: list[int] = []
    for index, (a, b, right, carry) in enumerate(asked.steps().tolist()):
        if index >= TIRED_AFTER and random.random() < STOP:
            break
        slipped = int(random.integers(1, BASE)) if random.random() < SLIP else 0
        written += [a, b, (right + slipped) % BASE, carry]
    return np.array([*written, END])


def positions(digits: int, chain: int) -> Ints:
    """Position ids of a problem's tokens and of so many of its chain's.

    A digit's tells which of its number it is, however long the numbers are.
    """
    index = np.arange(digits)
    plus, equals, start = 2 * MAX_DIGITS, 2 * MAX_DIGITS + 1, 2 * MAX_DIGITS + 2
    return np.concatenate([index, [plus], MAX_DIGITS + index, [equals], start + np.arange(chain)])
