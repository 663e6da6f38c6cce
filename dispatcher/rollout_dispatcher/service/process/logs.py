"""Log lines: text for a person at a terminal, one JSON object a line for everything else."""

import json
import logging
import sys
from datetime import UTC, datetime

from rollout_dispatcher.service.config.types import LogFormat, LogLevel


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(level: LogLevel, form: LogFormat) -> None:
    """Log to standard error from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    as_text = form is LogFormat.TEXT or (form is LogFormat.AUTO and sys.stderr.isatty())
    if as_text:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    else:
        handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
