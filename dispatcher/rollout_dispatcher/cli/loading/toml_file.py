"""A --config file: its values, and the line that each stands in."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_dispatcher.errors import ConfigError

_AT_LINE = re.compile(r" \(at line (\d+), column \d+\)$")


@dataclass(frozen=True, slots=True)
class TomlFile:
    """What a file says. lines: of each key, from 1."""

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
    return TomlFile(path, values, {key: _line_of(key, text) for key in values})


def _line_of(key: str, text: str) -> int:
    """Where a key, or a table of that name, begins; tomllib does not tell."""
    begins = re.compile(rf"""[ \t]*\[*[ \t]*["']?{re.escape(key)}["']?[ \t]*[=.\]]""")
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
