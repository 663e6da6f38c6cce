"""Loads a pydantic model from flags, environment variables and a TOML file, in that precedence.

Every field of the model is an option under one name: `window` is `--window`,
`DISPATCHER_WINDOW` and the TOML key `window`; an advanced one, `rank_tokens`, is
`--set rank-tokens=N`, `DISPATCHER_RANK_TOKENS` and a key of the TOML table [advanced]. Nothing that
was written is ignored: an unknown flag, variable or key is an error that names the nearest right
one, and all that is wrong is told at once.
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
from typing import Any, Generic, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rollout_dispatcher.cli.problems import ENV_PREFIX, Written, flag_of, set_flag_of, variable_of
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.hints import nearest, option_of
from rollout_dispatcher.service.config.serve import WRONG
from rollout_dispatcher.service.config.values import Reach, Unit

#: Kubernetes sets some of these in every pod beside a Service named `dispatcher`, clients read
#: others, and the test suite has a switch of its own; none is meant for us.
FOREIGN = re.compile(
    r"DISPATCHER_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_\w+)?|TLS_(CA|CLIENT_CERT|CLIENT_KEY)"
    r"|REQUIRE_TOOLS)"
)
#: What flags, variables and TOML write for "unset", as TOML and shells have no null.
NONE = "none"
#: The table of a --config file in which advanced options stand.
ADVANCED = "advanced"

_AT_LINE = re.compile(r" \(at line (\d+), column \d+\)$")

M = TypeVar("M", bound=BaseModel)
#: Values by option, and where they were written.
Layer = tuple[str, Mapping[str, Any]]
NO_DEFAULTS: Layer = ("", {})


@dataclass(frozen=True, slots=True)
class Loaded(Generic[M]):
    """A valid config and, for each field that was set, where: `--flag`, variable, `file:line`.

    given: the word among the flags that is none.
    """

    config: M
    sources: Mapping[str, str]
    given: str | None = None


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Has room for most flags on the line on which their help begins."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Of lists `N`, where argparse has `N [N ...]`: their help says that they are lists."""
        if action.nargs == argparse.ONE_OR_MORE:
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are ConfigError, with the nearest flag for a misspelt one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        kwargs["allow_abbrev"] = False  # an abbreviation breaks when an option is added
        super().__init__(*args, **kwargs)
        #: Options without a flag of their own, and how they are written.
        self.advanced: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse everything; what is left over is an error."""
        values, problems = self.parse(argv)
        if problems:
            raise ConfigError(*problems)
        return values

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """What is known, and what is wrong with the rest."""
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
) -> Loaded[M]:
    """Read a config. Raises ConfigError with everything that cannot be used, a line each.

    takes: how the help calls a word among the flags that is none, if there may be one. defaults:
    values that anything else has precedence over, and where they are from, by that word.
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
            problems += _take_file(written, Path(path))
        except ConfigError as error:  # what may stand in it is not called missing
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
    """The model, unless there are problems; then ConfigError with those and its own."""
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
    """What the others are together, where some options are `wrong` and not to be relied on."""
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
    """A parser with one flag a field, under the headings that the model's HEADINGS give.

    Of a model with COMMON options the help shows these, by theme, unless it is to show everything.
    Advanced options share `--set`.
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
    """Names, forms and what each does, as flags are shown."""
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
    """What `--set NAME=VALUE` says."""
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


def _take_file(written: Written, path: Path) -> Iterator[str]:
    file = read_toml(path)
    known = options_of(written.model)
    for key, value in file.values.items():
        place, is_table = file.place(key), isinstance(value, dict)
        if key in known and is_advanced(known[key]):
            yield f"{place}: {key} stands in the table [{ADVANCED}]"
        elif key in known:
            _take(written, key, value, place)
        elif key == ADVANCED and is_table:
            yield from _take_table(written, value, file)
        elif is_table and value.keys() & known:
            yield f"{place}: options stand by themselves, not in a table [{key}]"
        else:
            yield f"{place}: unknown key {key}{nearest(key, known)}"


def _take_table(written: Written, table: Mapping[str, Any], file: "TomlFile") -> Iterator[str]:
    """What stands under [advanced]."""
    known = options_of(written.model)
    for key, value in table.items():
        if key not in known:
            yield f"{file.place(key)}: unknown key {key}{nearest(key, known)}"
        elif is_advanced(known[key]):
            _take(written, key, value, file.place(key))
        else:
            yield f"{file.place(key)}: {key} stands by itself, above the table [{ADVANCED}]"


# -- a --config file --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TomlFile:
    """What a file says. lines: of each key, those in [advanced] included, from 1."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]

    def place(self, key: str) -> str:
        """`serve.toml:3`."""
        return f"{self.path}:{self.lines[key]}"


def read_toml(path: Path) -> TomlFile:
    """Read a file. Raises ConfigError if that cannot be done."""
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
    table = values.get(ADVANCED)
    keys = [*values, *(table if isinstance(table, dict) else ())]
    return TomlFile(path, values, {key: _line_of(key, text) for key in keys})


def _line_of(key: str, text: str) -> int:
    """Where a key, or a table of that name, begins; tomllib does not tell."""
    key = rf"""({ADVANCED}[ \t]*\.[ \t]*)?["']?{re.escape(key)}["']?"""
    begins = re.compile(rf"""[ \t]*\[*[ \t]*{key}[ \t]*[=.\]]""")
    lines = text.splitlines()
    places = [at for at, line in enumerate(lines) if begins.match(line)]
    # Inside of a text of several lines something may look like it: what is before is no file then.
    whole = (at + 1 for at in places if _is_toml("\n".join(lines[:at])))
    return next(whole, 1)


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


# -- how a field is written: as what, unit, list or not, optional or not ----------------------


def options_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields that can be set outside Python."""
    fields = model.model_fields.items()
    return {name: field for name, field in fields if Reach.FIXED not in field.metadata}


def is_advanced(field: FieldInfo) -> bool:
    """Whether the option has no flag of its own."""
    return Reach.ADVANCED in field.metadata


def themes(model: type[BaseModel], *, advanced: bool) -> dict[str, dict[str, FieldInfo]]:
    """Options that are flags, or those that are advanced, by the model's HEADINGS."""
    headings: Mapping[str, str] = getattr(model, "HEADINGS", {})
    found: dict[str, dict[str, FieldInfo]] = {}
    theme = ""
    for name, field in options_of(model).items():
        theme = headings.get(name, theme)
        if is_advanced(field) == advanced:
            found.setdefault(theme, {})[name] = field
    return found


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
    if kind is bool:
        return "on|off"
    for choice in (kind, *get_args(kind)):
        if isinstance(choice, type) and issubclass(choice, Enum):
            return "|".join(item.value for item in choice)
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
