"""What aiohttp logs of malformed requests, without what was in them: that may be a token.

Its parser's errors quote the header or the line that it could not read. That some came is a figure
in the metrics, and a line in the log for those who look for it.
"""

import logging
from collections.abc import Callable, Iterator

from aiohttp.http_exceptions import HttpProcessingError

log = logging.getLogger(__name__)


def server_log(count: Callable[[str], None]) -> logging.Logger:
    """The log for one HTTP server; malformed requests are counted by this reason."""
    found = logging.Logger(log.name)
    found.parent, found.propagate = log, True
    found.addFilter(_WithoutQuotes(count))
    return found


class _WithoutQuotes(logging.Filter):
    """Counts what a parser's error led to, and puts the error's kind in its place."""

    def __init__(self, count: Callable[[str], None]) -> None:
        super().__init__()
        self._count = count

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged; it is changed where it quotes."""
        error = record.exc_info[1] if record.exc_info else None
        kinds = [type(it).__name__ for it in _chain(error) if isinstance(it, HttpProcessingError)]
        if not kinds:
            return True
        self._count("malformed")
        record.msg, record.args = "a malformed HTTP request was refused: %s", (kinds[0],)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return log.isEnabledFor(logging.DEBUG)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
