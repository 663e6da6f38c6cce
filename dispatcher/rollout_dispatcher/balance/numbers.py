"""Lengths and costs as callers have them: lists, arrays, tensors, lists of scalar tensors.

Invariant: what is returned is finite and not negative; for anything else UnequalPartitions names
the first number that is wrong. Tensors are known by what they can do (`tolist`, `item`).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.errors import UnequalPartitions
from rollout_dispatcher.plan import FloatArray, IntArray

#: Lengths are summed as int64, so that a million of them may be as long as this.
_LONGEST = 2**43


def as_lengths(values: Any, what: str = "lengths") -> IntArray:
    """Whole numbers, int64[n]."""
    found = _checked(values, what)[1]
    if not len(found):
        return np.zeros(0, dtype=np.int64)
    if found.dtype.kind == "f":
        _refuse_first(found, found != np.rint(found), f"{what} must be whole numbers")
    _refuse_first(found, found > _LONGEST, f"{what} must be at most {_LONGEST}")
    return found.astype(np.int64)


def as_costs(values: Any, what: str = "costs") -> FloatArray:
    """Numbers, float64[n]; whole ones are exact up to 2^53."""
    return _checked(values, what)[1].astype(np.float64)


def as_plain(values: Any, what: str = "lengths") -> list[Any]:
    """Python's own integers and floats, as large as they are."""
    return _checked(values, what)[0]


def as_groups(values: Any, n: int) -> IntArray:
    """Dense group numbers, int64[n], of any hashable names, by first appearance."""
    names = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(names) != n:
        raise UnequalPartitions(f"{len(names)} groups for {n} lengths; name one for each sample")
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _checked(values: Any, what: str) -> tuple[list[Any], NDArray[Any]]:
    """As a list and as an array."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain, Iterable) or isinstance(plain, str | bytes):
        raise UnequalPartitions(f"{what} must be a sequence of numbers, not {plain!r}")
    plain = [value.item() if hasattr(value, "item") else value for value in plain]
    odd = [at for at, value in enumerate(plain) if not isinstance(value, int | float)]
    if odd:
        raise UnequalPartitions(
            f"{what} must be one number a sample, and number {odd[0]} is {plain[odd[0]]!r}"
        )
    found = np.array(plain) if plain else np.zeros(0)
    _refuse_first(found, found < 0, f"{what} must not be negative")
    _refuse_first(found, np.logical_not(found < np.inf), f"{what} must be finite")
    return plain, found


def _refuse_first(values: NDArray[Any], wrong: Any, why: str) -> None:
    at = np.flatnonzero(wrong)
    if len(at):
        raise UnequalPartitions(f"{why}, and number {at[0]} is {values[at[0]]}")
