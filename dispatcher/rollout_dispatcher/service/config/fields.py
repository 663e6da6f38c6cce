"""Fields as operators write them: `input_ids:int64, reward:float32:per-sample, image:uint8[3x8]`.

Reading what was written gives the same field again. A field's name, its element type, the shape of
what it has for each token (or sample, or row) if that is more than one number, and whether it has
one value a sample, or rows of each sample's own (`ragged`), instead of one value a token. Text says
it all by its type: `env:str`.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import AfterValidator

from rollout_dispatcher.protocol.messages import MAX_DIMENSIONS, MAX_FIELDS, MAX_NAME
from rollout_dispatcher.sample import METADATA, DType, Field, Schema, is_reserved

PER_SAMPLE, PER_TOKEN, RAGGED = PLACES = "per-sample", "per-token", "ragged"
_TYPE = re.compile(r"(\w+)(?:\[(\d+(?:x\d+)*)\])?", re.ASCII)
#: What other languages and frameworks call the same.
_ALIASES = {
    "float": DType.FLOAT32, "double": DType.FLOAT64, "half": DType.FLOAT16, "f16": DType.FLOAT16,
    "f32": DType.FLOAT32, "f64": DType.FLOAT64, "bf16": DType.BFLOAT16, "fp16": DType.FLOAT16,
    "fp32": DType.FLOAT32, "fp64": DType.FLOAT64, "single": DType.FLOAT32, "int": DType.INT64,
    "long": DType.INT64, "integer": DType.INT64, "short": DType.INT16, "byte": DType.UINT8,
    "char": DType.INT8, "i8": DType.INT8, "i16": DType.INT16, "i32": DType.INT32,
    "i64": DType.INT64, "u8": DType.UINT8, "boolean": DType.BOOL, "uint64": DType.INT64,
    "uint32": DType.INT64, "uint16": DType.INT32, "string": DType.STR, "text": DType.STR,
    "utf8": DType.STR, "utf-8": DType.STR,
}  # fmt: skip


def _is_flat(field: Field) -> bool:
    return field.per_token and not field.shape


_EXPECTED: dict[str, Callable[[Field], bool]] = {
    "input_ids": lambda field: "int" in field.dtype and _is_flat(field),
    "loss_mask": _is_flat,
}
_WORDS = {"input_ids": "an integer", "loss_mask": "0 or 1"}


def parse_field(text: str) -> Field:
    """Raises ValueError that says what is wrong, and names the nearest right type."""
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
    expected = _EXPECTED.get(name)
    if expected is not None and not expected(field):
        raise ValueError(f"{name} is one number a token ({_WORDS[name]}), not {field}")
    return field


def _type(name: str, text: str) -> tuple[DType, tuple[int, ...]]:
    match = _TYPE.fullmatch(text)
    if match is None:
        raise ValueError(f"the type of {name} is written int64 or float16[4x2], not {text!r}")
    if match[1] not in tuple(DType):
        raise ValueError(f"{name} has no type {match[1]!r}{_nearest(match[1])}")
    shape = tuple(map(int, match[2].split("x"))) if match[2] else ()
    if len(shape) > MAX_DIMENSIONS or not all(1 <= extent < 2**31 for extent in shape):
        raise ValueError(f"{name} has {MAX_DIMENSIONS} dimensions at most, none of them empty")
    return DType(match[1]), shape


def _nearest(word: str) -> str:
    """The type that was meant, probably, and all there are."""
    similar = difflib.get_close_matches(word.lower(), list(DType), n=1, cutoff=0.5)
    found = _ALIASES.get(word.lower()) or next(iter(similar), None)
    meant = f" (did you mean {found}?)" if found else ""
    return f"{meant}; there are {', '.join(DType)}"


def format_field(field: Field) -> str:
    """The inverse of `parse_field`."""
    shape = f"[{'x'.join(map(str, field.shape))}]" if field.shape else ""
    where = f":{RAGGED if field.ragged else PER_SAMPLE}"
    is_plain = field.per_token or field.is_text
    return f"{field.name}:{field.dtype}{shape}{'' if is_plain else where}"


def schema_of(fields: Iterable[str]) -> Schema | None:
    """What every sample has, in the order in which producers send it; None if nothing was said.

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
