"""A log that strangers cannot flood: of each kind a few lines a minute, then how many more.

Whoever reaches a port can have a connection refused thousands of times a second. Each is counted in
metrics; the log tells the first few of a kind in full, and the others by their number.
"""

import logging
from collections.abc import Callable
from time import monotonic

#: Lines of one kind that are logged in full within `WINDOW_SECONDS`.
IN_FULL = 10
WINDOW_SECONDS = 60.0


class RateLimitedLog:
    """Writes to `log` at level info. Kinds are few: words of ours, never of a peer."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = monotonic) -> None:
        self._log, self._clock = log, clock
        self._begun_at = clock()
        self._seen: dict[str, int] = {}

    def tell(self, kind: str, message: str, *args: object) -> None:
        """Log it, or count it."""
        self.tell_more()
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        if seen <= IN_FULL:
            self._log.info(message, *args)

    def tell_more(self) -> None:
        """Once a window is over: say how many were not logged in it. To be called now and then."""
        now = self._clock()
        if now < self._begun_at + WINDOW_SECONDS:
            return
        seconds, self._begun_at = now - self._begun_at, now
        seen, self._seen = self._seen, {}
        for kind, count in seen.items():
            if count > IN_FULL:
                self._log.info(
                    "... and %s more that ended so (%s), in %.0f s",
                    f"{count - IN_FULL:,}", kind, seconds,
                )  # fmt: skip


#: Connections that end in an error, whoever made them.
ended_connections = RateLimitedLog(logging.getLogger(__name__))
