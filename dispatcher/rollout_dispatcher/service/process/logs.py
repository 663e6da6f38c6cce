"""Log lines: text for a person at a terminal, one JSON object a line for everything else.

Messages quote what peers call themselves and their samples. Invariant: whatever they say, a record
is one line of bounded length, with nothing in it that a terminal would obey. A traceback follows in
indented lines.
"""

import json
import logging
import sys
from datetime import UTC, datetime

from rollout_dispatcher.service.config.types import LogFormat, LogLevel

#: Characters of a message; our own have a few hundred, names that peers give some 128 each.
MAX_CHARACTERS = 4096


class TextFormatter(logging.Formatter):
    """Time, level and message; a traceback follows, indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """Write one line."""
        record.message = harmless(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as text."""
        first, *others = super().format(record).split("\n")
        return "\n".join((first, *(f"    {harmless(line)}" for line in others)))


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": harmless(record.getMessage()),
        }
        if record.exc_info:
            traceback = self.formatException(record.exc_info)
            line["traceback"] = "\n".join(map(harmless, traceback.split("\n")))
        return json.dumps(line)


def harmless(text: str) -> str:
    r"""The same on one line, without what a terminal would obey, and not too long.

    "a\nb" is a line feed between two letters, in such a text: breaks of lines, control characters
    and those that turn the direction of writing are written as Python writes them.
    """
    beyond = len(text) - MAX_CHARACTERS
    if beyond > 0:
        text = f"{text[:MAX_CHARACTERS]}... ({beyond:,} characters more)"
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def set_up(level: LogLevel, form: LogFormat) -> None:
    """Log to standard error from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    as_text = form is LogFormat.TEXT or (form is LogFormat.AUTO and sys.stderr.isatty())
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
