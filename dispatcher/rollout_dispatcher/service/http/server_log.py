"""What aiohttp logs of clients' faults: they are no errors of ours, and their words stay out.

Its parser's errors quote the header or the line that it could not read, which may be a token. That
some came is a figure in the metrics, and a line in the log for those who look for it. Such a line
is all, too, where a client hangs up before it is answered: whatever is written to it next fails.
"""

import logging
from collections.abc import Callable, Iterator

from aiohttp.http_exceptions import HttpProcessingError

log = logging.getLogger(__name__)


def server_log(count: Callable[[str], None]) -> logging.Logger:
    """The log for one HTTP server; malformed requests are counted by this reason."""
    found = logging.Logger(log.name)
    found.parent, found.propagate = log, True
    found.addFilter(_ClientsFaults(count))
    return found


class _ClientsFaults(logging.Filter):
    """Counts what a parser's error led to, and puts the error's kind in the place of its words."""

    def __init__(self, count: Callable[[str], None]) -> None:
        super().__init__()
        self._count = count

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged; it is changed where it quotes."""
        error = record.exc_info[1] if record.exc_info else None
        kinds = [type(it).__name__ for it in _chain(error) if isinstance(it, HttpProcessingError)]
        if kinds:
            self._count("malformed")
            return _quieter(record, "a malformed HTTP request was refused: %s", kinds[0])
        if isinstance(error, ConnectionError):
            return _quieter(record, "an HTTP client hung up: %s", type(error).__name__)
        return True


def _quieter(record: logging.LogRecord, words: str, kind: str) -> bool:
    """These words instead, for those who look for them; returns whether anybody does."""
    record.msg, record.args = words, (kind,)
    record.exc_info = record.exc_text = None
    record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return log.isEnabledFor(logging.DEBUG)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
