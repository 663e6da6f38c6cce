"""Tables of docs/protocol.md, from the code: what is agreed, said when, and means what."""

import inspect
import json
import re
from typing import Any

from rollout_dispatcher import errors
from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.sessions import RECEIVES, SENDS, SessionState, Side
from rollout_dispatcher.sample import DType, Outcome

#: Errors that no dispatcher sends: the base of all, and what clients raise by themselves.
UNTOLD = {
    DispatcherError, errors.ClientClosed, errors.DispatcherUnreachable, errors.StepContractError,
    errors.UnequalPartitions,
}  # fmt: skip
#: What headers are made of beside plain values.
PARTS: tuple[type[m.Part], ...] = (m.FieldHeader, m.ObjectHeader, m.CheckpointPosition, m.PassTimes)


def offer() -> str:
    """What this release speaks."""
    return f"This release speaks version {m.VERSION}."


def states() -> str:
    """The dispatcher's states, a row each: a client's are their mirror."""
    found = ["| state | the dispatcher sends | the dispatcher receives |", "|---|---|---|"]
    for state in SessionState:
        said, heard = (_moves(table[Side.DISPATCHER], state) for table in (SENDS, RECEIVES))
        if said or heard:
            found.append(f"| `{state}` | {said} | {heard} |")
    return "\n".join(found)


def _moves(table: dict[tuple[SessionState, type[m.Message]], SessionState], at: str) -> str:
    moves = {kind: after for (state, kind), after in table.items() if state == at}
    staying = sorted((kind for kind in moves if moves[kind] == at), key=_code)
    leaving = sorted((kind for kind in moves if moves[kind] != at), key=_code)
    return ", ".join(
        [f"`{kind.__name__}`" for kind in staying]
        + [f"`{kind.__name__}` → `{moves[kind]}`" for kind in leaving]
    )


def _code(kind: type[m.Message]) -> int:
    return kind.type_code


def messages() -> str:
    """A row a message and a row a field; last, fields that several messages share, and parts."""
    rows = ["| code, message; field | direction; type | meaning |", "|---|---|---|"]
    kinds = sorted(m.MESSAGES.values(), key=_code)
    for kind in kinds:
        about = " ".join(_about(kind).split())
        rows.append(f"| **{kind.type_code} {kind.__name__}** | {_direction(kind)} | {about} |")
        rows += _fields(kind)
    shared: dict[str, list[str]] = {}
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__[1:]):
        sharing = [kind.__name__ for kind in kinds if issubclass(kind, base)]
        if issubclass(base, m.Message) and base is not m.Message:
            shared.setdefault(", ".join(sharing), []).extend(_fields(base))
    for names, fields in shared.items():
        rows += [f"| **also in {names}** | | |", *fields]
    for part in PARTS:
        rows += [f"| **{part.__name__}** | | {' '.join(_about(part).split())} |", *_fields(part)]
    return "\n".join(rows)


def _own(part: type[m.Part]) -> set[str]:
    """Fields that no message above it has."""
    above = [base for base in part.__mro__[1:] if issubclass(base, m.Message)]
    return set(part.model_fields) - {name for base in above for name in base.model_fields}


def _direction(kind: type[m.Message]) -> str:
    said = {side for side in Side if kind in {said for _, said in SENDS[side]}}
    heard = {side for side in Side if kind in {heard for _, heard in RECEIVES[side]}}
    return "; ".join(
        f"{speaker} to {listener}"
        for speaker in Side
        for listener in Side
        if speaker in said
        and listener in heard
        and (speaker is Side.DISPATCHER) != (listener is Side.DISPATCHER)
    )


def _about(part: type[m.Part]) -> str:
    """What its docstring says before the first field."""
    text = inspect.cleandoc(part.__doc__ or "")
    first = re.search(r"^(\w+(, \w+)*): ", text, re.MULTILINE)
    return text[: first.start()] if first else text


def _fields(part: type[m.Part]) -> list[str]:
    rows = []
    schema = part.model_json_schema()
    meanings = meanings_of(part)
    required = schema.get("required", ())
    for name, shape in schema["properties"].items():
        if name not in _own(part):
            continue
        default = "" if name in required else f"; default {_default(part, name)}"
        rows.append(f"| `{name}` | {_type(shape)}{default} | {meanings[name]} |")
    return rows


def meanings_of(part: type[m.Part]) -> dict[str, str]:
    """What the docstrings of a class and of its bases say of each field."""
    found: dict[str, str] = {}
    for base in reversed(part.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        for entry in re.finditer(r"^(\w+(?:, \w+)*): (.*(?:\n +.*)*)", text, re.MULTILINE):
            for name in entry[1].split(", "):
                if name in part.model_fields:
                    found[name] = " ".join(entry[2].split())
    return found


def _default(part: type[m.Part], name: str) -> str:
    value = part.model_fields[name].get_default(call_default_factory=True)
    return f"`{json.dumps(value)}`"


def _type(shape: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in shape:
        name = str(shape["$ref"]).rsplit("/", 1)[1]
        return {"DType": _words(DType), "Outcome": _words(Outcome)}.get(name, name)
    if "allOf" in shape:
        return _type(shape["allOf"][0])
    if "anyOf" in shape:
        return " or ".join(map(_type, shape["anyOf"]))
    match shape["type"]:
        case "array" if "prefixItems" in shape:
            return f"[{', '.join(_type(item) for item in shape['prefixItems'])}]"
        case "array":
            most = f", at most {shape['maxItems']}" if "maxItems" in shape else ""
            each = _type(shape["items"])
            return f"list of {f'({each})' if ' or ' in each else each}{most}"
        case "object":
            return f"object of {_type(shape['additionalProperties'])}"
        case "integer":
            bits = (shape["exclusiveMaximum"] - 1).bit_length()
            below = "" if bits == 53 else f" below 2^{bits}"
            return f"integer from {shape['minimum']}{below}"
        case "string" if "maxLength" in shape:
            return f"string of {shape.get('minLength', 0)} to {shape['maxLength']} characters"
        case kind:
            return str(kind)


def _words(found: type[DType | Outcome]) -> str:
    return " or ".join(f"`{word}`" for word in found)


def codes() -> str:
    """A row an error that goes over the wire."""
    rows = ["| code | may succeed later | what it means |", "|---|---|---|"]
    tree = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    told = [kind for kind in tree if issubclass(kind, DispatcherError) and kind not in UNTOLD]
    for kind in sorted(told, key=lambda kind: kind.code):
        about = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{kind.code}` | {'yes' if kind.retriable else 'no'} | {about} |")
    return "\n".join(rows)
