"""Quantities as operators write them: `100ms`, `5m`, `64MiB`.

Reading what was written gives the same float or int again, bit for bit (`Unit.format` and
`Unit.parse` are inverse), so a config that is printed and loaded back is the same config. Text
needs a unit, as `--max-wait 100` could mean anything; numbers (Python, TOML) are base units.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

_QUANTITY = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]+)", re.IGNORECASE | re.ASCII)
_NEARLY = re.compile(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, eq=False)  # hashable: part of `Size | None`
class Unit:
    """A family of suffixes, in ascending order of `scale`; the base unit has scale 1."""

    metavar: str
    base: str
    examples: str
    scale: MappingProxyType[str, Fraction]
    #: Suffixes that a number without one may mean, and what else people write for suffixes.
    likely: tuple[str, ...]
    also: MappingProxyType[str, str]

    def parse(self, value: object) -> object:
        """Text to base units; numbers pass through. Raises ValueError that shows how to write."""
        if not isinstance(value, str):
            return value
        match = _QUANTITY.fullmatch(value.strip())
        scale = self.scale.get(match[2]) if match else None
        if match is None or scale is None:
            known, meant = ", ".join(self.scale), self._meant(value.strip())
            hint = f"; did you mean {meant}?" if meant else ""
            raise ValueError(f"write a number and a unit ({known}), as in {self.examples}{hint}")
        exact = Fraction(match[1]) * scale
        return int(exact) if exact.denominator == 1 else float(exact)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """A number of base units, or text with a unit."""
        text = rf"^[0-9]*\.?[0-9]+ *({'|'.join(self.scale)})$"
        number = handler(schema)
        bounds = {"gt": "exclusiveMinimum", "ge": "minimum"}  # behind a validator they stay raw
        number = {bounds.get(key, key): value for key, value in number.items()}
        return {"anyOf": [number, {"type": "string", "pattern": text}]}

    def _meant(self, text: str) -> str:
        """What a number without a unit, or with one that is nearly right, may mean."""
        number = _NEARLY.fullmatch(text)
        if number is None:
            return ""
        if not (suffix := number[2]):
            return " or ".join(f"{number[1]}{each}" for each in self.likely)
        folded = {name.casefold(): name for name in self.scale} | self.also
        right = folded.get(suffix.casefold())
        return f"{number[1]}{right}" if right else ""

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
    ("ms", "s"),
    MappingProxyType({
        "sec": "s", "secs": "s", "second": "s", "seconds": "s", "msec": "ms", "millis": "ms",
        "min": "m", "mins": "m", "minute": "m", "minutes": "m", "hr": "h", "hour": "h",
        "hours": "h", "day": "d", "days": "d",
    }),
)  # fmt: skip
SIZE = Unit(
    "SIZE",
    "B",
    "512KiB, 64MiB, 4GiB",
    _scales(B=1, kB=10**3, KiB=2**10, MB=10**6, MiB=2**20, GB=10**9, GiB=2**30, TB=10**12,
            TiB=2**40),
    ("MiB", "GiB"),
    MappingProxyType({
        "k": "KiB", "ki": "KiB", "m": "MiB", "mi": "MiB", "g": "GiB", "gi": "GiB", "t": "TiB",
        "ti": "TiB", "byte": "B", "bytes": "B",
    }),
)  # fmt: skip

#: Seconds, written `2s`; greater than zero and finite.
Duration = Annotated[
    float, BeforeValidator(DURATION.parse), DURATION, Field(gt=0, allow_inf_nan=False)
]
#: The same, or `0s`.
DurationOrNothing = Annotated[
    float, BeforeValidator(DURATION.parse), DURATION, Field(ge=0, allow_inf_nan=False)
]
#: Bytes, written `64MiB`; at least one.
Size = Annotated[int, BeforeValidator(SIZE.parse), SIZE, Field(ge=1)]
#: The same, or `0B`.
SizeOrNothing = Annotated[int, BeforeValidator(SIZE.parse), SIZE, Field(ge=0)]
