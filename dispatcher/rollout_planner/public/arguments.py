"""What callers of the public planner pass beside lengths, checked in one place.

Invariant: what is not as documented raises UnequalPartitions, which is a ValueError, before
anything is planned.
"""

from enum import StrEnum
from operator import index
from typing import SupportsIndex, TypeVar

import numpy as np

from rollout_planner.cost.models import Quadratic, parse_cost
from rollout_planner.errors import ConfigError, GroupTooLong, SampleTooLong, UnequalPartitions
from rollout_planner.numbers import LONGEST, as_costs
from rollout_planner.types import CostModel, FloatArray, IntArray, Oversize
from rollout_planner.validate import too_many_fillers

_Option = TypeVar("_Option", bound=StrEnum)
_REMEDY = "raise the budget, truncate the sample, or pass oversize='alone'"
#: Counts go into arrays of int64.
_MOST = 2**63 - 1
#: No sample is longer, so that a larger budget is as good as none; and many times this is still an
#: integer of 64 bits.
_AMPLE = 2 * LONGEST


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


def at_least(least: int, **counts: SupportsIndex) -> list[int]:
    """Each count as a whole number, at least that and of 63 bits, in the order given.

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
        if number > _MOST:
            raise UnequalPartitions(f"{name} is {number}; it must be at most {_MOST}")
        found.append(number)
    return found


def token_budget(**budget: SupportsIndex) -> int:
    """As `at_least` 1; one that nobody can fill, as sys.maxsize, as one that can be added up."""
    [found] = at_least(1, **budget)
    return min(found, _AMPLE)


def padding(pad_to: SupportsIndex) -> int:
    """As `at_least` 1, and no more than a sample may have."""
    [found] = at_least(1, pad_to=pad_to)
    if found > LONGEST:
        raise UnequalPartitions(f"pad_to is {found}; it must be at most {LONGEST}")
    return found


def option(name: str, value: str, kind: type[_Option], *allowed: _Option) -> _Option:
    """The member of an enumeration that argument `name` has; only some where `allowed` says so."""
    choices = allowed or tuple(kind)
    if value not in [str(choice) for choice in choices]:
        named = " or ".join(f"'{choice}'" for choice in choices)
        raise UnequalPartitions(f"{name} is {value!r}; use {named}")
    return kind(value)


def oversize_option(value: str) -> Oversize:
    """Samples above the budget are an error or go alone; what is dropped, the caller leaves out."""
    return option("oversize", value, Oversize, Oversize.ERROR, Oversize.ALONE)


def check_fillers(micro_batches: int, samples: int, asked_by: str) -> None:
    """Raise UnequalPartitions for a number of micro-batches that nobody can mean."""
    if found := too_many_fillers(micro_batches, samples, asked_by):
        raise UnequalPartitions(found)


def check_longest(tokens: IntArray, budget: int) -> None:
    """Raise SampleTooLong for the first sample that cannot be in any micro-batch."""
    over = np.flatnonzero(tokens > budget)
    if len(over):
        at = int(over[0])
        raise SampleTooLong(int(tokens[at]), budget, f"it is number {at}: {_REMEDY}")


def check_groups(group: IntArray, tokens: IntArray, budget: int) -> None:
    """Raise GroupTooLong for the first group that cannot be whole in any micro-batch.

    group: dense group number of each sample.
    """
    held = np.bincount(group, weights=tokens)
    over = np.flatnonzero(held > budget)
    if len(over):
        members = np.flatnonzero(group == over[0])
        remedy = f"it is that of number {members[0]}: raise the budget, or pass oversize='alone'"
        raise GroupTooLong(len(members), int(held[over[0]]), budget, remedy)
