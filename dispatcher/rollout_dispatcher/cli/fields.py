"""What an option's declaration says about how it is written: unit, list or not, optional or not.

`format_value` and `toml_value` write a value so that reading it gives the same value again.
"""

import json
import types
from collections.abc import Iterator
from enum import Enum
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rollout_dispatcher.service.config.values import Unit


def flag_of(name: str) -> str:
    """`window_multiple` -> `--window-multiple`."""
    return "--" + name.replace("_", "-")


def unit_of(field: FieldInfo) -> Unit | None:
    """The unit in which the option is written, if it has one."""
    found = (item for item in _metadata(field) if isinstance(item, Unit))
    return next(found, None)


def expects_list(field: FieldInfo) -> bool:
    """Whether the option may be given more than once."""
    return get_origin(field.annotation) in {tuple, list}


def is_optional(field: FieldInfo) -> bool:
    """Whether the option may be unset."""
    return types.NoneType in get_args(field.annotation)


def metavar(name: str, field: FieldInfo) -> str:
    """What stands for the value in the help: unit, choices, `N`, or the name's last word."""
    unit = unit_of(field)
    kind = field.annotation
    if unit is not None:
        return unit.metavar
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(item.value for item in kind)
    number = kind in {int, float} or any(part in {int, float} for part in _plain(kind))
    words = [word for part in get_args(kind) for word in get_args(part) if isinstance(word, str)]
    return "|".join(["N", *words]) if number else name.rpartition("_")[2].upper()


def format_value(field: FieldInfo, value: object) -> str:
    """A value as it is written after its flag."""
    unit = unit_of(field)
    if unit is not None and isinstance(value, int | float):
        return unit.format(value)
    if isinstance(value, tuple | list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value if isinstance(value, Enum) else value)


def toml_value(field: FieldInfo, value: object) -> str:
    """A value as it is written in a TOML file; not for None, which TOML lacks."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(json.dumps(str(item)) for item in value) + "]"
    if isinstance(value, int | float) and unit_of(field) is None:
        return repr(value)
    return json.dumps(format_value(field, value), ensure_ascii=False)


def _metadata(field: FieldInfo) -> Iterator[Any]:
    yield from field.metadata
    yield from _nested(field.annotation)


def _plain(annotation: object) -> Iterator[Any]:
    """The types in a union, without their metadata."""
    for part in get_args(annotation):
        yield getattr(part, "__origin__", part)


def _nested(annotation: object) -> Iterator[Any]:
    """Metadata inside a union: that of `Duration | None` is not the field's own."""
    yield from getattr(annotation, "__metadata__", ())
    if get_origin(annotation) in {Union, types.UnionType}:
        for part in get_args(annotation):
            yield from _nested(part)
