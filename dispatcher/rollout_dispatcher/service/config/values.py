"""The types of option values: choices, addresses, counts, quantities, fields.

Each is read from flags, environment variables and TOML keys alike. A value that cannot be read
raises ValueError, to which pydantic adds the option's name.

Quantities have a unit (`100ms`, `5m`, `64MiB`). Text needs one, as `--max-wait 100` is ambiguous;
numbers (Python, TOML) are in base units. `Unit.format` and `Unit.parse` are inverse, bit for bit,
so a config that is printed and loaded again is the same.

A field is written `input_ids:int64, reward:float32:per-sample, image:uint8[3x8]`: name, element
type, shape of one value unless it is a single number, and `per-sample` (one value a sample) or
`ragged` (a number of rows that differs by sample) instead of one value a token. A text, one a
sample, is `env:str`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, PlainSerializer
from pydantic import Field as Declared

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.journal.policy import parse_sync
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.messages import MAX_DIMENSIONS, MAX_FIELDS, MAX_NAME
from rollout_dispatcher.sample import METADATA, DType, Field, Schema, is_reserved

T = TypeVar("T")


class Reach(Enum):
    """How an option without a flag can be set; a mark in a field's metadata."""

    #: By `--set NAME=VALUE`, DISPATCHER_<NAME>, or the table [advanced] of a file.
    ADVANCED = "advanced"
    #: In Python alone, for tests.
    FIXED = "fixed"


Advanced = Annotated[T, Reach.ADVANCED]
Fixed = Annotated[T, Reach.FIXED]


class LastBatch(StrEnum):
    """The fate of samples left at the end of the stream."""

    FLUSH = "flush"
    DROP = "drop"


class IncompleteGroups(StrEnum):
    """The fate of a group that will never be complete."""

    DROP = "drop"
    KEEP = "keep"


class Retain(StrEnum):
    """How long samples of committed steps are kept."""

    COMMIT = "commit"
    CHECKPOINT = "checkpoint"


class LogLevel(StrEnum):
    """The least severe level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """The format of the log; `auto` is text on a terminal and JSON elsewhere."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


#: The address of a payload store: its scheme, then a part that only workers interpret. That of
#: files is checked here, as it is mistyped so easily (`file://mnt`).
_STORE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*:.|file:(//(localhost)?)?/[^/]", re.ASCII)


def _read_endpoint(value: object) -> object:
    try:
        return Endpoint.parse(value) if isinstance(value, str) else value
    except ConfigError as error:  # pydantic adds the option's name to a ValueError
        raise ValueError(str(error)) from None


def split_commas(value: object) -> object:
    """Split texts at commas."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    parts = (part.split(",") if isinstance(part, str) else [part] for part in value)
    return tuple(part for several in parts for part in several)


def one_or_several(value: object) -> object:
    """Turn a text or a number into a list of one."""
    return (value,) if isinstance(value, str | int | float) else value


def _read_store(value: str) -> str:
    if _STORE.match(value.strip()) is None:
        raise ValueError(
            "write the address of a payload store with its scheme, and a directory by its whole "
            f"path, as in file:///mnt/rollouts, not {value!r}"
        )
    return value.strip()


def _read_sync(value: str) -> str:
    try:
        parse_sync(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


#: The default address of the HTTP plane.
HTTP_PLANE = Endpoint("127.0.0.1", 9471)
#: Headers of the answers to probes: the run, and the release.
RUN_HEADER, VERSION_HEADER = "Rollout-Dispatcher-Run-Id", "Rollout-Dispatcher-Version"

Address = Annotated[
    Endpoint, BeforeValidator(_read_endpoint), PlainSerializer(str, when_used="json")
]
StoreAddress = Annotated[str, Declared(max_length=1024), AfterValidator(_read_store)]
Positive = Annotated[int, Declared(ge=1, lt=2**53)]
NotNegative = Annotated[int, Declared(ge=0, lt=2**53)]
#: A window, in dispatch batches.
Multiple = Annotated[float, Declared(ge=1, le=64, allow_inf_nan=False)]
#: A share of one, or more.
Ratio = Annotated[float, Declared(ge=0, allow_inf_nan=False)]
#: A share of the mean, or no bound.
Variation = Annotated[float, Declared(gt=0, le=16, allow_inf_nan=False)] | Literal["off"]
JournalSync = Annotated[str, AfterValidator(_read_sync)]

_QUANTITY = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]+)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, eq=False)  # hashable: part of `Size | None`
class Unit:
    """A family of suffixes, in ascending order of `scale`; the base unit has scale 1."""

    metavar: str
    base: str
    examples: str
    scale: MappingProxyType[str, Fraction]

    def parse(self, value: object) -> object:
        """Text to base units; numbers pass through. Raises ValueError with examples."""
        if not isinstance(value, str):
            return value
        match = _QUANTITY.fullmatch(value.strip())
        scale = self.scale.get(match[2]) if match else None
        if match is None or scale is None:
            known = ", ".join(self.scale)
            raise ValueError(f"write a number and a unit ({known}), as in {self.examples}")
        exact = Fraction(match[1]) * scale
        return int(exact) if exact.denominator == 1 else float(exact)

    def format(self, value: float) -> str:
        """Base units to text, in the largest unit that leaves a whole number."""
        for suffix, scale in sorted(self.scale.items(), key=lambda item: -item[1]):
            amount = Fraction(value) / scale
            if amount.denominator == 1 and amount:
                return f"{amount}{suffix}"
        for suffix, scale in self.scale.items():
            short = Fraction(format(float(Fraction(value) / scale), ".6g"))
            if short.denominator == 1 and float(short * scale) == value and short:
                return f"{short}{suffix}"
        return f"{value!r}{self.base}"


def _scales(**scale: Fraction | int) -> MappingProxyType[str, Fraction]:
    return MappingProxyType({suffix: Fraction(value) for suffix, value in scale.items()})


DURATION = Unit(
    "DURATION",
    "s",
    "100ms, 2s, 5m",
    _scales(ms=Fraction(1, 1000), s=1, m=60, h=3600, d=86400),
)
SIZE = Unit(
    "SIZE",
    "B",
    "512KiB, 64MiB, 4GiB",
    _scales(B=1, kB=10**3, KiB=2**10, MB=10**6, MiB=2**20, GB=10**9, GiB=2**30, TB=10**12,
            TiB=2**40),
)  # fmt: skip

#: Seconds, written `2s`; greater than zero and finite.
Duration = Annotated[
    float, BeforeValidator(DURATION.parse), DURATION, Declared(gt=0, allow_inf_nan=False)
]
#: The same, or `0s`.
DurationOrNothing = Annotated[
    float, BeforeValidator(DURATION.parse), DURATION, Declared(ge=0, allow_inf_nan=False)
]
#: Bytes, written `64MiB`; at least one.
Size = Annotated[int, BeforeValidator(SIZE.parse), SIZE, Declared(ge=1)]
#: The same, or `0B`.
SizeOrNothing = Annotated[int, BeforeValidator(SIZE.parse), SIZE, Declared(ge=0)]

PER_SAMPLE, PER_TOKEN, RAGGED = PLACES = "per-sample", "per-token", "ragged"
_TYPE = re.compile(r"(\w+)(?:\[(\d+(?:x\d+)*)\])?", re.ASCII)


#: Fields that have one number a token, and which.
_NUMBERS = {"input_ids": "an integer", "loss_mask": "0 or 1"}


def parse_field(text: str) -> Field:
    """Read a field. Raises ValueError with cause and remedy."""
    name, *rest = (part.strip() for part in text.split(":"))
    if not 1 <= len(rest) <= 2 or not name:
        raise ValueError(
            f"write name:dtype, name:dtype:{PER_SAMPLE} or name:dtype:{RAGGED}, as in "
            f"reward:float32:{PER_SAMPLE}, not {text!r}"
        )
    if is_reserved(name) or name in METADATA or len(name) > MAX_NAME:
        raise ValueError(f"a field may not be called {name!r}")
    where = rest[1] if len(rest) > 1 else PER_TOKEN
    if where not in PLACES:
        raise ValueError(
            f"{name} is {PER_TOKEN} (the default), {PER_SAMPLE} or {RAGGED}, not {where!r}"
        )
    dtype, shape = _type(name, rest[0])
    field = Field(name, dtype, where == PER_TOKEN, shape, where == RAGGED)
    if field.is_text:
        if shape or len(rest) > 1:
            raise ValueError(f"{name} is one text a sample; write {name}:{DType.STR}, not {text!r}")
        field = Field.text(name)
    is_flat = field.per_token and not field.shape
    if name in _NUMBERS and not (is_flat and (name != "input_ids" or "int" in field.dtype)):
        raise ValueError(f"{name} is one number a token ({_NUMBERS[name]}), not {field}")
    return field


def _type(name: str, text: str) -> tuple[DType, tuple[int, ...]]:
    match = _TYPE.fullmatch(text)
    if match is None:
        raise ValueError(f"the type of {name} is written int64 or float16[4x2], not {text!r}")
    if match[1] not in tuple(DType):
        raise ValueError(f"{name} has no type {match[1]!r}; there are {', '.join(DType)}")
    shape = tuple(map(int, match[2].split("x"))) if match[2] else ()
    if len(shape) > MAX_DIMENSIONS or not all(1 <= extent < 2**31 for extent in shape):
        raise ValueError(f"{name} has {MAX_DIMENSIONS} dimensions at most, none of them empty")
    return DType(match[1]), shape


def format_field(field: Field) -> str:
    """The inverse of `parse_field`."""
    shape = f"[{'x'.join(map(str, field.shape))}]" if field.shape else ""
    where = f":{RAGGED if field.ragged else PER_SAMPLE}"
    is_plain = field.per_token or field.is_text
    return f"{field.name}:{field.dtype}{shape}{'' if is_plain else where}"


def schema_of(fields: Iterable[str]) -> Schema | None:
    """The schema of these fields, in the order of the wire; None for no fields.

    Raises ValueError for fields that no sample can have.
    """
    found = sorted(map(parse_field, fields), key=lambda field: field.name)
    if not found:
        return None
    names = [field.name for field in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is declared twice")
    if "input_ids" not in names:
        raise ValueError("every sample has input_ids; declare input_ids:int64 too")
    if len(found) > MAX_FIELDS:
        raise ValueError(f"{len(found)} fields are declared, and a sample has at most {MAX_FIELDS}")
    return Schema(tuple(found))


#: One field, written `name:dtype`, `name:dtype:per-sample` or `name:dtype:ragged`.
DeclaredField = Annotated[str, AfterValidator(lambda text: format_field(parse_field(text)))]
