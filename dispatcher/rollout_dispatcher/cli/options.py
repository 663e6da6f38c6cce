"""Loads a pydantic model from flags, environment variables and a TOML file, in that precedence.

Every field of the model is an option under one name: `window` is `--window`,
`DISPATCHER_WINDOW` and the TOML key `window`; an advanced one, `rank_tokens`, is
`--set rank-tokens=N`, `DISPATCHER_RANK_TOKENS` and a key of the TOML table [advanced]. Nothing is
ignored: an unknown flag, variable or key is an error that names the nearest known one. All problems
are reported together.
"""

import argparse
import json
import re
import shutil
import textwrap
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rollout_dispatcher.cli.problems import ENV_PREFIX, Written, flag_of, set_flag_of, variable_of
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.hints import nearest, option_of
from rollout_dispatcher.service.config.serve import WRONG
from rollout_dispatcher.service.config.values import Reach, Unit

#: Variables of others: Kubernetes sets some in every pod beside a Service named `dispatcher`,
#: clients read some, and one is a switch of the test suite.
FOREIGN = re.compile(
    r"DISPATCHER_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_\w+)?|TLS_(CA|CLIENT_CERT|CLIENT_KEY)"
    r"|REQUIRE_TOOLS)"
)
#: Unsets an option in flags, variables and TOML, which have no null.
NONE = "none"
#: The table of advanced options in a --config file.
ADVANCED = "advanced"

_AT_LINE = re.compile(r" \(at line (\d+), column \d+\)$")

M = TypeVar("M", bound=BaseModel)
#: The source of values, and the values by option.
Layer = tuple[str, Mapping[str, Any]]
NO_DEFAULTS: Layer = ("", {})
NO_OPTIONS: Mapping[str, FieldInfo] = {}


@dataclass(frozen=True, slots=True)
class Loaded(Generic[M]):
    """A valid config, and the source of each field that is set: `--flag`, variable, `file:line`.

    given: the positional argument.
    """

    config: M
    sources: Mapping[str, str]
    given: str | None = None


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A help column wide enough for most flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """`N` for lists, where argparse has `N [N ...]`; their help calls them lists."""
        if action.nargs == argparse.ONE_OR_MORE:
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are ConfigError, with the nearest flag for a misspelt one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        kwargs["allow_abbrev"] = False  # an abbreviation breaks when an option is added
        super().__init__(*args, **kwargs)
        #: How to write each option without a flag.
        self.advanced: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments. Raises ConfigError for unknown ones."""
        values, problems = self.parse(argv)
        if problems:
            raise ConfigError(*problems)
        return values

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse known arguments; returns them and the problems with the others."""
        values, rest = self.parse_known_args(list(argv))
        flags = [text for action in self._actions for text in action.option_strings]
        problems, value_due = [], False
        for text in rest:
            name, equals, _ = text.partition("=")
            is_flag = text.startswith("-") and len(text) > 1
            if is_flag or not value_due:
                hint = nearest(name, flags) if is_flag else ""
                if instead := self.advanced.get(option_of(name.replace("--no-", "--", 1))):
                    hint = f" (write {instead}=VALUE)"
                problems.append(f"unknown argument {name}{hint}; see {self.prog} --help")
            value_due = is_flag and not equals
        return values, problems


def load_config(
    model: type[M],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str = "",
    epilog: str = "",
    takes: str = "",
    defaults: Callable[[str | None], Layer] = lambda _: NO_DEFAULTS,
    unused: Mapping[str, FieldInfo] = NO_OPTIONS,
) -> Loaded[M]:
    """Read a config. Raises ConfigError with all problems, one per line.

    takes: the positional argument's name in the help, if there may be one. defaults: values of the
    lowest precedence and their source, by the positional argument. unused: options of another
    command, whose file may be given; keys of these that the model lacks are skipped.
    """
    build = partial(
        build_parser, model, prog=prog, description=description, epilog=epilog, takes=takes
    )
    parsed, problems = build().parse(argv)
    if parsed.__dict__.pop("help_all", False):
        build(everything=True).print_help()
        raise SystemExit(0)
    flags = vars(parsed)
    path = flags.pop("config", None) or environ.get(f"{ENV_PREFIX}CONFIG")
    given = flags.pop("given", None)
    written = Written(model)
    source, values = defaults(given)
    for name, value in values.items():
        _take(written, name, value, source)
    if path:
        try:
            problems += _take_file(written, Path(path), unused)
        except ConfigError as error:  # options that it may have are not reported as missing
            raise ConfigError(*problems, *error.problems) from None
    problems += _take_environment(written, environ)
    assignments = flags.pop("set", ())
    for name, value in flags.items():
        _take(written, name, value, flag_of(name))
    problems += _take_assignments(written, assignments)
    return Loaded(_validated(written, problems), written.sources, given)


def _take(written: Written, name: str, value: object, place: str) -> None:
    unset = value == NONE and is_optional(written.model.model_fields[name])
    written.values[name] = None if unset else value
    written.sources[name] = place


def _validated(written: Written, problems: list[str]) -> Any:
    """The model. Raises ConfigError with `problems` and those of the model."""
    try:
        config = written.model.model_validate(written.values)
    except ValidationError as error:
        wrong = written.wrong_values(error)
        problems += [text for texts in wrong.values() for text in texts]
        problems += _together(written, frozenset(wrong) - {""})
    except ConfigError as error:
        problems += map(written.with_places, error.problems)
    else:
        if not problems:
            return config
    raise ConfigError(*problems)


def _together(written: Written, wrong: frozenset[str]) -> list[str]:
    """Problems of the other options together, where some are `wrong`."""
    values = {name: value for name, value in written.values.items() if name not in wrong}
    fields = written.model.model_fields
    values |= {name: 1 for name in wrong if fields[name].is_required()}  # all of them are counts
    try:
        written.model.model_validate(values, context={WRONG: wrong})
    except ConfigError as error:
        return list(map(written.with_places, error.problems))
    except ValidationError:
        return []
    return []


def build_parser(
    model: type[BaseModel],
    *,
    prog: str,
    description: str,
    epilog: str,
    takes: str = "",
    everything: bool = False,
) -> Parser:
    """A parser with a flag for each field, under the model's HEADINGS; advanced ones share `--set`.

    The help shows the model's COMMON options, if it has such, unless `everything` is set.
    """
    required = [flag_of(name) for name, field in model.model_fields.items() if field.is_required()]
    words = [prog, *filter(None, [takes]), *(f"{flag} N" for flag in required), "[options]"]
    parser = Parser(prog=prog, usage=" ".join(words), description=description, epilog=epilog)
    if takes:
        parser.add_argument("given", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="read options from a TOML file"
    )
    options = options_of(model)
    advanced = {name: field for name, field in options.items() if is_advanced(field)}
    if advanced:
        parser.advanced = {name: set_flag_of(name) for name in advanced}
        parser.add_argument(
            "--set", metavar="NAME=VALUE", action="append", default=argparse.SUPPRESS,
            help="set an advanced option, repeatable; see docs/settings.md",
        )  # fmt: skip
    common: Mapping[str, Sequence[str]] = getattr(model, "COMMON", {})
    if common:
        parser.add_argument(
            "--help-all", action="store_true", default=argparse.SUPPRESS, help="show every option"
        )
    flags = themes(model, advanced=False)
    if common and not everything:
        flags = {theme: {name: options[name] for name in names} for theme, names in common.items()}
    for theme, fields in flags.items():
        group: Any = parser.add_argument_group(theme) if theme else parser
        for name in fields:
            _add_flag(group, name, options.pop(name))
    if advanced and (everything or not common):
        parser.add_argument_group("advanced, each as --set NAME=VALUE", _listed(advanced))
    for name in options.keys() - advanced:
        _add_flag(parser, name, options[name], hidden=True)
    return parser


def _listed(advanced: Mapping[str, FieldInfo]) -> str:
    """Name, form and help of each, as of flags."""
    width = shutil.get_terminal_size().columns - 4
    return "\n".join(
        textwrap.fill(
            f"{flag_of(name)[2:]}={metavar(name, field)}: {_help_text(field)}",
            width, subsequent_indent=" " * 8,
        )
        for name, field in advanced.items()
    )  # fmt: skip


def _help_text(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    if field.is_required():
        return f"{text} (required)"
    return text if field.default is None else f"{text} [{format_value(field, field.default)}]"


def _add_flag(group: Any, name: str, field: FieldInfo, *, hidden: bool = False) -> None:
    settings: dict[str, Any] = {
        "dest": name,
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS if hidden else _help_text(field).replace("%", "%%"),
    }
    if field.annotation is bool:
        settings["action"] = argparse.BooleanOptionalAction
    else:
        settings["metavar"] = metavar(name, field)
        if expects_list(field):
            settings |= {"action": "extend", "nargs": "+"}
    group.add_argument(flag_of(name), **settings)


def _take_assignments(written: Written, texts: Sequence[str]) -> Iterator[str]:
    """Take `--set NAME=VALUE`; yields problems."""
    known = options_of(written.model)
    advanced = [flag_of(name)[2:] for name, field in known.items() if is_advanced(field)]
    for text in texts:
        shown, equals, value = text.partition("=")
        name = shown.strip().replace("-", "_")
        if name in known and not is_advanced(known[name]):
            yield f"--set {shown}: this option has a flag of its own; write {flag_of(name)}"
        elif name not in known:
            yield f"--set {shown}: unknown setting{nearest(shown, advanced)}"
        elif not equals:
            yield f"--set {shown}: write {set_flag_of(name)}=VALUE, with no space around ="
        else:
            _take(written, name, value, set_flag_of(name))


def _take_environment(written: Written, environ: Mapping[str, str]) -> Iterator[str]:
    known = {variable_of(name): name for name in options_of(written.model)}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or FOREIGN.fullmatch(variable):
            continue
        if variable in known:
            name = known[variable]
            many = expects_list(written.model.model_fields[name])
            value = [part.strip() for part in text.split(",")] if many else text
            _take(written, name, value, variable)
        elif variable != f"{ENV_PREFIX}CONFIG":
            hint = nearest(variable, known)
            yield f"unknown environment variable {variable}{hint}"


def _take_file(
    written: Written, path: Path, unused: Mapping[str, FieldInfo] = NO_OPTIONS
) -> Iterator[str]:
    file = read_toml(path)
    own = options_of(written.model)
    known = {**unused, **own}
    for key, value, in_table in file.items():
        place = f"{path}:{file.lines[key]}"
        tables = [is_advanced(options[key]) for options in (own, unused) if key in options]
        if key not in known:
            if isinstance(value, dict) and value.keys() & known:
                yield f"{place}: options stand by themselves, not in a table [{key}]"
            else:
                yield f"{place}: unknown key {key}{nearest(key, known)}"
        elif in_table in tables:
            if key in own:
                _take(written, key, value, place)
        elif in_table:
            yield f"{place}: {key} stands by itself, above the table [{ADVANCED}]"
        else:
            yield f"{place}: {key} stands in the table [{ADVANCED}]"


# -- a --config file --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A file's content. lines: number of each key's line, from 1, those in [advanced] included."""

    values: dict[str, Any]
    lines: dict[str, int]

    def items(self) -> Iterator[tuple[str, Any, bool]]:
        """Key, value, and whether it is in the table [advanced]."""
        for key, value in self.values.items():
            if key == ADVANCED and isinstance(value, dict):
                yield from ((each, value[each], True) for each in value)
            else:
                yield key, value, False


def read_toml(path: Path) -> TomlFile:
    """Read a file. Raises ConfigError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--config {path} cannot be read: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        found = _AT_LINE.search(str(error))
        at, why = (f":{found[1]}", str(error)[: found.start()]) if found else ("", str(error))
        raise ConfigError(f"{path}{at}: this is not valid TOML: {why}") from None
    file = TomlFile(values, {})
    file.lines.update((key, _line_of(key, text)) for key, *_ in file.items())
    return file


def _line_of(key: str, text: str) -> int:
    """Line of a key or of a table with that name, which tomllib does not give."""
    key = rf"""({ADVANCED}[ \t]*\.[ \t]*)?["']?{re.escape(key)}["']?"""
    begins = re.compile(rf"""[ \t]*\[*[ \t]*{key}[ \t]*[=.\]]""")
    lines = text.splitlines()
    places = [at for at, line in enumerate(lines) if begins.match(line)]
    # A line in a multi-line string may look alike; the text before it is no valid TOML then.
    whole = (at + 1 for at in places if _is_toml("\n".join(lines[:at])))
    return next(whole, 1)


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


# -- fields of a model as options -------------------------------------------------------------


def options_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields that can be set outside of Python."""
    fields = model.model_fields.items()
    return {name: field for name, field in fields if Reach.FIXED not in field.metadata}


def is_advanced(field: FieldInfo) -> bool:
    """Whether the option is written as `--set NAME=VALUE`."""
    return Reach.ADVANCED in field.metadata


def themes(model: type[BaseModel], *, advanced: bool) -> dict[str, dict[str, FieldInfo]]:
    """Options with flags, or the advanced ones, by the model's HEADINGS."""
    headings: Mapping[str, str] = getattr(model, "HEADINGS", {})
    found: dict[str, dict[str, FieldInfo]] = {}
    theme = ""
    for name, field in options_of(model).items():
        theme = headings.get(name, theme)
        if is_advanced(field) == advanced:
            found.setdefault(theme, {})[name] = field
    return found


def unit_of(field: FieldInfo) -> Unit | None:
    """The unit of the option's values, if they have one."""
    found = (item for item in _parts(field) if isinstance(item, Unit))
    return next(found, None)


def expects_list(field: FieldInfo) -> bool:
    """Whether the option may be given more than once."""
    return get_origin(field.annotation) in {tuple, list}


def is_optional(field: FieldInfo) -> bool:
    """Whether the option may be unset."""
    return types.NoneType in get_args(field.annotation)


def metavar(name: str, field: FieldInfo) -> str:
    """The value in the help: unit, choices, `N`, or the name's last word."""
    unit, parts = unit_of(field), list(_parts(field))
    if unit is not None:
        return unit.metavar
    if field.annotation is bool:
        return "on|off"
    for part in parts:
        if isinstance(part, type) and issubclass(part, Enum):
            return "|".join(item.value for item in part)
    words = [part for part in parts if isinstance(part, str)]
    is_number = int in parts or float in parts
    return "|".join(["N", *words]) if is_number else name.rpartition("_")[2].upper()


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


def _parts(field: FieldInfo) -> Iterator[Any]:
    """The field's metadata, and all types and metadata inside of its annotation."""
    yield from field.metadata
    pending: list[Any] = [field.annotation]
    while pending:
        yield (part := pending.pop(0))
        pending += get_args(part)  # `Duration | None` has the metadata of Duration inside
