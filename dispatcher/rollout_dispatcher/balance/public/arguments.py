"""What callers of the public planner pass beside lengths, checked in one place.

Invariant: what is not as documented raises UnequalPartitions, which is a ValueError, before
anything is planned.
"""

from enum import StrEnum
from typing import TypeVar

import numpy as np

from rollout_dispatcher.balance.cost.models import Quadratic, parse_cost
from rollout_dispatcher.balance.numbers import as_costs
from rollout_dispatcher.errors import ConfigError, SampleTooLong, UnequalPartitions
from rollout_dispatcher.plan import CostModel, FloatArray, IntArray, Oversize

_Option = TypeVar("_Option", bound=StrEnum)
_REMEDY = "raise the budget, truncate the sample, or pass oversize='alone'"


def cost_model(cost: CostModel | str | None) -> CostModel:
    """As given, by its name (`tokens`, `quadratic:a,b,d`), or quadratic by default."""
    if cost is None:
        return Quadratic()
    if not isinstance(cost, str):
        return cost
    try:
        return parse_cost(cost)
    except ConfigError as error:
        raise UnequalPartitions(str(error)) from None


def costs_of(tokens: IntArray, cost: CostModel | str | None) -> FloatArray:
    """Cost of each sample, float64[n]."""
    found = as_costs(cost_model(cost)(tokens))
    if len(found) != len(tokens):
        raise UnequalPartitions(f"the cost model gave {len(found)} costs for {len(tokens)} samples")
    return found


def at_least(least: int, **counts: int | None) -> None:
    """Each count is at least that, or left out."""
    for name, value in counts.items():
        if value is not None and value < least:
            raise UnequalPartitions(f"{name} is {value}; it must be at least {least}")


def option(kind: type[_Option], value: str, *allowed: _Option) -> _Option:
    """The member of an enumeration that a text names; only some where `allowed` says so."""
    choices = allowed or tuple(kind)
    if value not in [str(choice) for choice in choices]:
        named = " or ".join(f"'{choice}'" for choice in choices)
        raise UnequalPartitions(f"{value!r} is not known here; use {named}")
    return kind(value)


def oversize_option(value: str) -> Oversize:
    """Samples above the budget are an error or go alone; what is dropped, the caller leaves out."""
    return option(Oversize, value, Oversize.ERROR, Oversize.ALONE)


def check_longest(tokens: IntArray, budget: int) -> None:
    """Raise SampleTooLong for the first sample that cannot be in any micro-batch."""
    over = np.flatnonzero(tokens > budget)
    if len(over):
        at = int(over[0])
        raise SampleTooLong(int(tokens[at]), budget, f"it is number {at}: {_REMEDY}")
