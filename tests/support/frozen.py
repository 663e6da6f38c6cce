"""Everything that an object holds, as plain values: equal if and only if nothing has changed.

Take `frozen(core)` before and after what must not change it, and compare.
"""

from collections import deque
from enum import Enum
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import numpy as np

_PLAIN = (str, bytes, int, float, bool, type(None), Enum, type)
_CODE = (FunctionType, MethodType, BuiltinMethodType)


def frozen(value: object) -> Any:
    """The value with all that it refers to; objects that refer to each other are told apart."""
    return _freeze(value, {})


def _freeze(value: object, seen: dict[int, int]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, _CODE):
        return value.__qualname__
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, memoryview):
        return value.tobytes()
    if isinstance(value, dict):
        return [(_freeze(key, seen), _freeze(held, seen)) for key, held in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple | deque):
        return [_freeze(held, seen) for held in value]
    if isinstance(value, BaseException):
        return type(value), str(value)
    return type(value), [(name, _freeze(held, seen)) for name, held in _attributes(value)]


def _attributes(value: object) -> list[tuple[str, object]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = dict.fromkeys([*slots, *getattr(value, "__dict__", {})])
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
