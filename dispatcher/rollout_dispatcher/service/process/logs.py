"""Log lines: text for a person at a terminal, one JSON object a line for everything else.

Messages quote what peers call themselves and their samples. Invariant: whatever they say, a record
is one line of bounded length, with nothing in it that a terminal would obey; a traceback follows in
indented lines. And however often they make us say the same, the log grows by a bounded pace: of
each line of code that logs, `BURST` lines are written in any `PERIOD_SECONDS` that begin with one,
and the next line says how many were left out. Where strangers can cause a line it is logged with
the `kind` of what they did, and of each kind only a `FEW` are written; metrics count them all.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from rollout_dispatcher.hints import harmless
from rollout_dispatcher.service.config.types import LogFormat, LogLevel

#: More than a fleet of ranks or producers causes when it comes or goes.
BURST = 1000
#: Whoever reaches a port can have a connection refused thousands of times a second.
FEW = 10
PERIOD_SECONDS = 60.0


class Repeats(logging.Filter):
    """Leaves out lines that come too often. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._periods: dict[tuple[str, int, str], _Period] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write this line, which notes how many like it were left out before."""
        now, kind = self._clock(), getattr(record, "kind", "")
        where, most = (record.pathname, record.lineno, kind), FEW if kind else BURST
        period = self._periods.get(where)
        if period is None or now >= period.start + PERIOD_SECONDS:
            self._periods[where] = _Period(now)
            if period is not None and period.lines > most:
                left_out = period.lines - most
                record.msg = f"{record.getMessage()} ({left_out} more like this were left out)"
                record.args = None
            return True
        period.lines += 1
        return period.lines <= most


@dataclass(slots=True)
class _Period:
    """How many lines of one place there were since `start`, the first of them included."""

    start: float
    lines: int = 1


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


def set_up(level: LogLevel, form: LogFormat) -> None:
    """Log to standard error from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Repeats())
    as_text = form is LogFormat.TEXT or (form is LogFormat.AUTO and sys.stderr.isatty())
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
