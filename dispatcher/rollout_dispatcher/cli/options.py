"""Loads a pydantic model from flags, environment variables and a TOML file, in that precedence.

Every field of the model is an option under one name: `window_multiple` is `--window-multiple`,
`DISPATCHER_WINDOW_MULTIPLE` and the TOML key `window_multiple`. Nothing that was written is
ignored: an unknown flag, variable or key is a ConfigError that names the nearest right one.
"""

import argparse
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rollout_dispatcher.cli.fields import expects_list, flag_of, format_value, is_optional, metavar
from rollout_dispatcher.errors import ConfigError

ENV_PREFIX = "DISPATCHER_"
#: Kubernetes sets some of these in every pod beside a Service named `dispatcher`, clients read
#: others, and the test suite has a switch of its own; none is meant for us.
FOREIGN = re.compile(
    r"DISPATCHER_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_\w+)?|TLS_(CA|CLIENT_CERT|CLIENT_KEY)"
    r"|REQUIRE_TOOLS)"
)
#: What flags, variables and TOML write for "unset", as TOML and shells have no null.
NONE = "none"

M = TypeVar("M", bound=BaseModel)
#: Values by option, and where they were written.
Layer = tuple[str, Mapping[str, Any]]
NO_DEFAULTS: Layer = ("", {})


@dataclass(frozen=True, slots=True)
class Loaded(Generic[M]):
    """A valid config and, for each field that was set, where: `--flag`, variable or file."""

    config: M
    sources: Mapping[str, str]


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are ConfigError, with the nearest flag for a misspelt one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs["allow_abbrev"] = False  # an abbreviation breaks when an option is added
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse everything; what is left over is an error."""
        values, rest = self.parse_known_args(list(argv))
        if rest:
            flags = [text for action in self._actions for text in action.option_strings]
            name = rest[0].partition("=")[0]
            hint = nearest(name, flags) if name.startswith("-") else ""
            raise ConfigError(f"unknown argument {name}{hint}; see {self.prog} --help")
        return values


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest of `known`, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def load_config(
    model: type[M],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str = "",
    epilog: str = "",
    defaults: Layer = NO_DEFAULTS,
) -> Loaded[M]:
    """Read a config. Raises ConfigError, in one line, for whatever cannot be used.

    defaults: values that anything else has precedence over, and where they are from.
    """
    parser = build_parser(model, prog=prog, description=description, epilog=epilog)
    flags = vars(parser.parse_strictly(argv))
    path = flags.pop("config", None) or environ.get(f"{ENV_PREFIX}CONFIG")
    layers = [
        defaults,
        (str(path), _from_file(model, Path(path)) if path else {}),
        ("environment", _from_environment(model, environ)),
        ("flags", flags),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        for name, value in layer.items():
            field = model.model_fields[name]
            values[name] = None if value == NONE and is_optional(field) else value
            sources[name] = _place(source, name)
    try:
        return Loaded(model.model_validate(values), sources)
    except ValidationError as error:
        raise ConfigError(_explain(model, error, values, sources)) from None


def build_parser(model: type[BaseModel], *, prog: str, description: str, epilog: str) -> Parser:
    """A parser with one flag a field, under the headings that the model's HEADINGS give."""
    required = [flag_of(name) for name, field in model.model_fields.items() if field.is_required()]
    usage = " ".join([prog, *(f"{flag} N" for flag in required), "[options]"])
    parser = Parser(prog=prog, usage=usage, description=description, epilog=epilog)
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="read options from a TOML file"
    )
    headings: Mapping[str, str] = getattr(model, "HEADINGS", {})
    group: Any = parser
    for name, field in model.model_fields.items():
        if name in headings:
            group = parser.add_argument_group(headings[name])
        _add_flag(group, name, field)
    return parser


def _add_flag(group: Any, name: str, field: FieldInfo) -> None:
    help_text = " ".join((field.description or "").split())
    if field.is_required():
        help_text += " (required)"
    elif field.default is not None:
        help_text += f" [{format_value(field, field.default)}]"
    settings: dict[str, Any] = {
        "dest": name,
        "default": argparse.SUPPRESS,
        "help": help_text.replace("%", "%%"),
    }
    if field.annotation is bool:
        settings["action"] = argparse.BooleanOptionalAction
    else:
        settings["metavar"] = metavar(name, field)
        settings["action"] = "append" if expects_list(field) else "store"
    group.add_argument(flag_of(name), **settings)


def _from_environment(model: type[BaseModel], environ: Mapping[str, str]) -> dict[str, Any]:
    known = {ENV_PREFIX + name.upper(): name for name in model.model_fields}
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or FOREIGN.fullmatch(variable):
            continue
        if variable in known:
            name = known[variable]
            many = expects_list(model.model_fields[name])
            found[name] = [part.strip() for part in text.split(",")] if many else text
        elif variable != f"{ENV_PREFIX}CONFIG":
            hint = nearest(variable, known)
            raise ConfigError(f"unknown environment variable {variable}{hint}")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """What a --config file says. Raises ConfigError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--config {path} cannot be read: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _from_file(model: type[BaseModel], path: Path) -> dict[str, Any]:
    values = read_toml(path)
    for key in values:
        if key not in model.model_fields:
            raise ConfigError(f"{path}: unknown key {key}{nearest(key, model.model_fields)}")
    return values


def _place(source: str, name: str) -> str:
    return {"environment": ENV_PREFIX + name.upper(), "flags": flag_of(name)}.get(source, source)


def _explain(
    model: type[BaseModel],
    error: ValidationError,
    values: Mapping[str, Any],
    sources: Mapping[str, str],
) -> str:
    """The first thing that is wrong, with the place where the user wrote it."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "missing":
        about = " ".join((model.model_fields[name].description or "").split())
        return (
            f"{flag_of(name)} is required ({about}); give the flag, {ENV_PREFIX}{name.upper()}, "
            f"or {name} in the --config file"
        )
    message = first["msg"].removeprefix("Value error, ")
    if name not in values:  # what the settings are together, or a default where it cannot be used
        return f"{flag_of(name)}: {message}" if name in model.model_fields else message
    source = sources[name]
    own = {_place("flags", name), _place("environment", name)}
    where = source if source in own else f"{source}: {name}"
    return f"{where} = {values[name]!r}: {message[0].lower()}{message[1:]}"
