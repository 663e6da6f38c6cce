"""Problems of options, each with the place where the option was written.

--max-wait 100: write a number and a unit (ms, s, m, h, d), as in 100ms, 2s, 5m
DISPATCHER_STRATEGY=windw: write round-robin, greedy, kk or window; did you mean window?
serve.toml:3: max_delay = -1: it must be at least 0
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from rollout_dispatcher.hints import nearest_of

ENV_PREFIX = "DISPATCHER_"
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def flag_of(name: str) -> str:
    """`window` -> `--window`."""
    return "--" + name.replace("_", "-")


def set_flag_of(name: str) -> str:
    """`rank_tokens` -> `--set rank-tokens`, which `=` and the value follow."""
    return "--set " + name.replace("_", "-")


def variable_of(name: str) -> str:
    """`window` -> `DISPATCHER_WINDOW`."""
    return ENV_PREFIX + name.upper()


@dataclass(slots=True)
class Written:
    """Values of a model's options, and their sources: `--flag`, variable or `file:line`."""

    model: type[BaseModel]
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def wrong_values(self, error: ValidationError) -> dict[str, list[str]]:
        """The problems of each option, by name; an empty name stands for all options together."""
        found: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):
            name = str(item["loc"][0]) if item["loc"] else ""
            if item["type"] == "too_short" and name in found:
                continue  # follows from the item that could not be read
            if item["type"] == "literal_error" and name in found:  # of a number or a word
                found[name][-1] += f", or {next(_choices(str(item['ctx']['expected'])))}"
                continue
            found.setdefault(name, []).append(self._explain(name, dict(item)))
        return found

    def with_places(self, problem: str) -> str:
        """A problem of several options, with the sources of those that are not set by flags."""
        words = set(re.findall(r"[a-z][a-z_-]+", problem))
        places = [
            place if place == variable_of(name) else f"{name} in {place}"
            for name, place in self.sources.items()
            if place not in {flag_of(name), set_flag_of(name)} and words & {name, flag_of(name)[2:]}
        ]
        return f"{problem} [{', '.join(places)}]" if places else problem

    def _explain(self, name: str, error: Mapping[str, Any]) -> str:
        if error["type"] == "missing":
            about = " ".join((self.model.model_fields[name].description or "").split())
            return (
                f"{flag_of(name)} is required ({about}); give the flag, {variable_of(name)}, "
                f"or {name} in the --config file"
            )
        if name not in self.values:  # an unusable default, or no option
            message = _message(error, error["input"])
            return f"{flag_of(name)}: {message}" if name in self.model.model_fields else message
        value = self.values[name]
        many = isinstance(value, list) and len(error["loc"]) > 1
        part = value[error["loc"][1]] if many and isinstance(error["loc"][1], int) else value
        return f"{self._written(name, part)}: {_message(error, part)}"

    def _written(self, name: str, value: object) -> str:
        """An option's value as it was written."""
        place = self.sources[name]
        if place.startswith((ENV_PREFIX, "--set ")):
            return f"{place}={value}"
        if place.startswith("--"):
            return f"{place} {value}"
        return f"{place}: {name} = {_as_toml(value)}"


def _message(error: Mapping[str, Any], value: object) -> str:
    kind = str(error["type"])
    if kind == "enum":
        return _choose(value, list(_choices(str(error["ctx"]["expected"]))))
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"it must be {words} {error['ctx'][key]:g}"
    wanted, _, trouble = kind.partition("_")
    if wanted in _KINDS and trouble in {"parsing", "type", "from_float"}:
        return f"write {_KINDS[wanted]}{_number_hint(value)}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}"


def _choices(expected: str) -> Iterator[str]:
    """From pydantic's `'a', 'b' or 'c'`."""
    return (found[1] for found in re.finditer(r"'([^']*)'", expected))


def _choose(value: object, choices: list[str]) -> str:
    listed = f"{', '.join(choices[:-1])} or {choices[-1]}" if choices[1:] else choices[0]
    near = nearest_of(str(value), choices)
    return f"write {listed}" + (f"; did you mean {near}?" if near else "")


def _number_hint(value: object) -> str:
    """The number meant by `1e6`, `1,000` or `64k`."""
    found = re.fullmatch(r"([\d.,_]+(?:e\d+)?)\s*([kKmM]?)", str(value).strip())
    if found is None:
        return ""
    try:
        number = float(re.sub("[,_]", "", found[1])) * {"": 1, "k": 1e3, "m": 1e6}[found[2].lower()]
    except ValueError:
        return ""
    return f"; did you mean {int(number)}?" if number.is_integer() else ""


def _as_toml(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:  # a date, which TOML has and JSON has not
        return str(value)
