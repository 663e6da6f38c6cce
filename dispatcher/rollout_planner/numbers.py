"""Lengths and costs as callers have them: lists, arrays, tensors, lists of scalar tensors.

Invariant: what is returned is finite and not negative; for anything else UnequalPartitions names
the first number that is wrong. Tensors are known by what they can do (`tolist`, `item`).
"""

from collections.abc import Iterable
from reprlib import repr as shortened
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_planner.errors import UnequalPartitions
from rollout_planner.types import FloatArray, IntArray

#: Lengths are summed as int64, so that a million of them may be as long as this.
LONGEST = 2**43
#: Sums of costs stay finite, also of as many as the largest budget has room for.
DEAREST = 1e280


def as_lengths(values: Any, what: str = "lengths") -> IntArray:
    """Whole numbers, int64[n]."""
    found = _checked(values, what)
    if found.dtype.kind == "f":
        _refuse_first(found, found != np.rint(found), f"{what} must be whole numbers")
    _refuse_first(found, found > LONGEST, f"{what} must be at most {LONGEST}")
    return found.astype(np.int64)


def as_costs(values: Any, what: str = "costs") -> FloatArray:
    """Numbers, float64[n]; whole ones are exact up to 2^53."""
    found = _checked(values, what)
    _refuse_first(found, found > DEAREST, f"{what} must be at most {DEAREST:g}")
    return found.astype(np.float64)


def as_plain(values: Any, what: str = "lengths") -> list[Any]:
    """Python's own integers and floats; integers may be as large as they are."""
    plain: list[Any] = _checked(values, what).tolist()
    return plain


def as_groups(values: Any, n: int) -> IntArray:
    """Dense group numbers, int64[n], of any hashable names, by first appearance; None is no name.

    A sample without a name has a group of its own. A tensor of one number stands for the number:
    tensors hash by identity, so that each would be a group.
    """
    numbers: dict[Any, int] = {}
    try:
        names = values.tolist() if hasattr(values, "tolist") else list(values)
        known = [object() if name is None else _as_scalar(name) for name in names]
        found = [numbers.setdefault(name, len(numbers)) for name in known]
    except TypeError as error:
        raise UnequalPartitions(f"groups must be one hashable name a sample: {error}") from None
    if len(found) != n:
        raise UnequalPartitions(f"{len(found)} groups for {n} lengths; name one for each sample")
    return np.array(found, dtype=np.int64)


def _checked(values: Any, what: str) -> NDArray[Any]:
    """One number an item, in an array of whatever kind holds them."""
    is_plain = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iuf"
    found = values if is_plain else _as_array(values, what)
    if found.dtype.kind == "f":
        found = found.astype(np.float64, copy=False)  # bounds are beyond narrower kinds
    _refuse_first(found, found < 0, f"{what} must not be negative")
    _refuse_first(found, np.logical_not(found < np.inf), f"{what} must be finite")
    return found


def _as_array(values: Any, what: str) -> NDArray[Any]:
    plain = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain, Iterable) or isinstance(plain, str | bytes):
        raise UnequalPartitions(f"{what} must be a sequence of numbers, not {shortened(plain)}")
    plain = list(plain)
    if plain and hasattr(plain[0], "item"):
        plain = [_as_scalar(value) for value in plain]
    try:
        found = np.array(plain) if plain else np.zeros(0)
    except ValueError:  # sequences within it
        found = np.array(plain, dtype=object)
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        _refuse_others(plain, what)  # else they are integers beyond 64 bits
    return found


def _as_scalar(value: Any) -> Any:
    """The number that a tensor or an array of one holds; of several a list; others as they are."""
    if not (hasattr(value, "item") and hasattr(value, "tolist")):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):  # torch's and numpy's word for more numbers than one
        return value.tolist()


def _refuse_others(plain: list[Any], what: str) -> None:
    """Raise UnequalPartitions for the first item that is no number."""
    for at, value in enumerate(plain):
        if not isinstance(value, int | float):
            raise UnequalPartitions(
                f"{what} must be one number a sample, and number {at} is {shortened(value)}"
            )


def _refuse_first(values: NDArray[Any], wrong: Any, why: str) -> None:
    at = np.flatnonzero(wrong)
    if len(at):
        raise UnequalPartitions(f"{why}, and number {at[0]} is {values[at[0]]}")
