"""What callers pass, checked in one place: lengths, costs, groups, counts and options.

Invariant: what is not as documented raises UnequalPartitions, which is a ValueError, before
anything is planned, and names the first number that is wrong. Lists, arrays, tensors and lists of
scalar tensors will do; tensors are known by what they can do (`tolist`, `item`).
"""

from collections.abc import Iterable
from enum import StrEnum
from operator import index
from reprlib import repr as shortened
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_planner.cost import DEAREST, LONGEST, Quadratic, parse_cost
from rollout_planner.errors import (
    ConfigError,
    GroupTooLong,
    SampleTooLong,
    UnequalPartitions,
    too_many_fillers,
)
from rollout_planner.types import CostModel, FloatArray, IntArray

_Option = TypeVar("_Option", bound=StrEnum)
_REMEDY = "raise the budget, truncate the sample, or pass oversize='alone'"
#: Counts go into arrays of int64.
_MOST = int(np.iinfo(np.int64).max)
#: No sample is longer, so that a larger budget is as good as none; and many times this is still an
#: integer of 64 bits.
_AMPLE = 2 * LONGEST


def as_lengths(values: Any) -> IntArray:
    """Whole numbers, int64[n]."""
    found = _checked(values, "lengths")
    if found.dtype.kind == "f":
        _refuse_first(found, found != np.rint(found), "lengths must be whole numbers")
    _refuse_first(found, found > LONGEST, f"lengths must be at most {LONGEST}")
    return found.astype(np.int64)


def as_costs(values: Any) -> FloatArray:
    """Numbers, float64[n]; whole ones are exact up to 2^53."""
    found = _checked(values, "costs")
    _refuse_first(found, found > DEAREST, f"costs must be at most {DEAREST:g}")
    return found.astype(np.float64)


def as_plain(values: Any) -> list[Any]:
    """Python's own integers and floats; integers may be as large as they are."""
    plain: list[Any] = _checked(values, "lengths").tolist()
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
        for at, value in enumerate(plain):  # if all are numbers, some are beyond 64 bits
            if not isinstance(value, int | float):
                raise UnequalPartitions(
                    f"{what} must be one number a sample, and number {at} is {shortened(value)}"
                )
    return found


def _as_scalar(value: Any) -> Any:
    """The number that a tensor or an array of one holds; of several a list; others as they are."""
    if not (hasattr(value, "item") and hasattr(value, "tolist")):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):  # torch's and numpy's word for more numbers than one
        return value.tolist()


def _refuse_first(values: NDArray[Any], wrong: Any, why: str) -> None:
    at = np.flatnonzero(wrong)
    if len(at):
        raise UnequalPartitions(f"{why}, and number {at[0]} is {values[at[0]]}")


def cost_model(cost: CostModel | str | None) -> CostModel:
    """As given, by its name (`tokens`, `quadratic:a,b,d`), or quadratic by default."""
    if cost is None:
        return Quadratic()
    if callable(cost):
        return cost
    if not isinstance(cost, str):
        raise UnequalPartitions(f"cost is {cost!r}; it must be a function of lengths, or its name")
    try:
        return parse_cost(cost)
    except ConfigError as error:
        raise UnequalPartitions(str(error)) from None


def costs_of(tokens: IntArray, cost: CostModel | str | None) -> FloatArray:
    """Cost of each sample, float64[n]."""
    found = as_costs(cost_model(cost)(tokens))
    if len(found) != len(tokens):
        raise UnequalPartitions(f"the cost model gave {len(found)} costs for {len(tokens)} samples")
    if tokens.any() and not found.any():
        raise UnequalPartitions(
            f"the cost model gives 0 for each of {len(found)} samples; pass one that gives more "
            "than 0, as cost='tokens' does"
        )
    return found


def at_least(least: int, most: int = _MOST, /, **counts: SupportsIndex) -> list[int]:
    """Each count as a whole number between these, in the order given.

    They may come as tensors or arrays of one number, which do not calculate as integers do.
    """
    found = []
    for name, value in counts.items():
        try:
            number = index(value)
        except TypeError:
            raise UnequalPartitions(f"{name} is {value!r}; it must be a whole number") from None
        if number < least:
            raise UnequalPartitions(f"{name} is {number}; it must be at least {least}")
        if number > most:
            raise UnequalPartitions(f"{name} is {number}; it must be at most {most}")
        found.append(number)
    return found


def token_budget(**budget: SupportsIndex) -> int:
    """As `at_least` 1; one that nobody can fill, as sys.maxsize, as one that can be added up."""
    [found] = at_least(1, **budget)
    return min(found, _AMPLE)


def option(name: str, value: str, *allowed: _Option) -> _Option:
    """The one of these members of an enumeration that argument `name` has."""
    for choice in allowed:
        if value == choice:
            return choice
    named = " or ".join(f"'{choice}'" for choice in allowed)
    raise UnequalPartitions(f"{name} is {value!r}; use {named}")


def check_fillers(micro_batches: int, samples: int, asked_by: str) -> None:
    """Raise UnequalPartitions for a number of micro-batches that nobody can mean."""
    if found := too_many_fillers(micro_batches, samples, asked_by):
        raise UnequalPartitions(found)


def check_fits(
    tokens: IntArray, budget: int, group: IntArray | None = None, *, numbered: bool = True
) -> None:
    """Raise SampleTooLong or GroupTooLong for the first that no micro-batch has room for.

    group: dense group number of each sample, where groups stay in one micro-batch. numbered:
    whether the caller knows samples by their number, and oversize as an argument.
    """
    over = np.flatnonzero(tokens > budget)
    if len(over):
        remedy = [f"it is number {over[0]}: {_REMEDY}"] if numbered else []
        raise SampleTooLong(int(tokens[over[0]]), budget, *remedy)
    held = np.zeros(0) if group is None else np.bincount(group, weights=tokens)
    over = np.flatnonzero(held > budget)
    if len(over):
        at = np.flatnonzero(group == over[0])
        remedy = [f"it is that of number {at[0]}: raise the budget, or pass oversize='alone'"]
        raise GroupTooLong(len(at), int(held[over[0]]), budget, *(remedy if numbered else []))
