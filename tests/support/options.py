"""Options of `dispatcher serve`: as arguments, and as texts name them."""

import re
from collections.abc import Mapping
from typing import Final

from rollout_dispatcher.cli.options import is_advanced, options_of
from rollout_dispatcher.cli.problems import flag_of, set_flag_of
from rollout_dispatcher.service.config.serve import ServeConfig

OPTIONS: Final = options_of(ServeConfig)
#: Settings that are no options; tests set them in Python.
FIXED: Final = ServeConfig.model_fields.keys() - OPTIONS.keys()
#: What can be given on the command line: `--max-wait`, `--set rank-tokens`.
FLAGS: Final = {
    set_flag_of(name) if is_advanced(field) else flag_of(name) for name, field in OPTIONS.items()
}


def named(text: str) -> set[str]:
    """The flags and advanced options that a text names."""
    return set(re.findall(r"(?<![\w-])--(?:set [a-z-]+|[a-z][a-z-]+)", text)) - {"--set"}


def arguments(options: Mapping[str, object]) -> list[str]:
    """Options by name as arguments; a list gives one several times, a bool is a switch."""
    return [word for name, value in options.items() for word in _words(name, value)]


def _words(name: str, value: object) -> list[str]:
    name = name.replace("-", "_")
    if name in OPTIONS and is_advanced(OPTIONS[name]):
        return ["--set", f"{name.replace('_', '-')}={value}"]
    flag = flag_of(name)
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    values = value if isinstance(value, list) else [value]
    return [word for item in values for word in (flag, str(item))]
