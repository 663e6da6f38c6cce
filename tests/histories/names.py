"""The map of names: what a history calls something, and what the product calls it today."""

import json
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

NAMES: dict[str, Any] = json.loads(Path(__file__).with_name("names.json").read_text())
_SAYS = {kind: (word, parts) for word, (kind, parts) in NAMES["says"].items()}
_WORDS = {today: word for word, today in NAMES["values"].items()}


@cache
def thing(word: str) -> Any:
    """The class or function that is made with this word."""
    module, _, name = NAMES["make"][word][0].partition(":")
    return reduce(getattr, name.split("."), import_module(module))


def make(word: str, /, *values: Any, **parts: Any) -> Any:
    """Build it; parts by the history's words, with `_` for a space."""
    names = NAMES["make"][word][1]
    return thing(word)(*values, **{names[_spaced(name)]: value for name, value in parts.items()})


def call(word: str, target: Any, /, **parts: Any) -> Any:
    """Tell it to the core or the journal."""
    name, names = NAMES["call"][word]
    return getattr(target, name)(**{names[_spaced(part)]: at for part, at in parts.items()})


def held(word: str, target: Any) -> Any:
    """An attribute."""
    return _at(target, NAMES["held"][word])


def value(word: str) -> str:
    """The product's word for a value."""
    return str(NAMES["values"][word])


def error() -> type[Exception]:
    """What the product raises at a peer."""
    module, _, name = NAMES["held"]["error"].partition(":")
    found: type[Exception] = getattr(import_module(module), name)
    return found


def told(effect: Any) -> tuple[str, dict[str, Any]] | None:
    """An effect in the history's words; None if it is of no matter."""
    kind = type(effect).__name__
    if kind in NAMES["silent"]:
        return None
    assert kind in _SAYS, f"names.json has to say what {kind} is called, or that it is silent"
    word, parts = _SAYS[kind]
    said = {part: plain(_at(effect, path)) for part, path in parts.items()}
    return word, {part: at for part, at in said.items() if at not in (None, [], {}, False)}


def read(table: str, target: Any) -> dict[str, Any]:
    """Everything that this table of the map names, of one object; nothing of what is empty."""
    found = {word: plain(_at(target, path)) for word, path in NAMES[table].items()}
    return {word: at for word, at in found.items() if at not in (None, [], {}, 0, "", False)}


def plain(found: Any) -> Any:
    """As JSON, without what a renaming or another plan would change."""
    match found:
        case Enum():
            return _WORDS.get(str(found.value), str(found.value))
        case np.ndarray() | np.generic():
            return plain(found.tolist())
        case None | bool() | int() | float() | str():
            return found
        case Exception():
            return held("error code", found)
        case Mapping():
            return {str(plain(key)): plain(at) for key, at in found.items() if at != 0}
        case Set():
            return sorted(map(plain, found))
        case _ if hasattr(found, NAMES["held"]["micro-batches"]):
            return _step(found)
        case _ if hasattr(found, NAMES["held"]["entry skips"]):
            skips = held("entry skips", found)
            return [_id(found), skips] if skips else _id(found)
        case _ if hasattr(found, NAMES["held"]["stored key"]):
            return held("stored key", found)
        case Sequence():
            return [plain(each) for each in found]
    raise TypeError(f"{found!r} is not what a history has")


def _id(entry: Any) -> str:
    return str(held("id", held("entry sample", entry)))


def _step(found: Any) -> dict[str, Any]:
    """Which samples it has, and where it stands; not who trains which."""
    number, attempt = held("step number", found), held("step attempt", found)
    ids = sorted(_id(one) for rank in held("micro-batches", found) for part in rank for one in part)
    return {
        "step": number,
        "attempt": attempt,
        "samples": ids,
        "planned": bool(held("step digest", found)),
    }


def _at(target: Any, path: str) -> Any:
    for name in path.split("."):
        target = getattr(target, name, None)
    return target


def _spaced(name: str) -> str:
    return name.replace("_", " ")
