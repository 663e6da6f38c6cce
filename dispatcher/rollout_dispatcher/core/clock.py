"""Time for the core: seconds that never go back, whatever the clock underneath does.

Invariant: two readings differ by what the source advanced in between, its steps back left out. So
no wait is ever negative, and a deadline that was set before a step back comes no later than it
would have come without it. A step forward cannot be told from time that passed, and is believed.
"""

from collections.abc import Callable


class SteadyClock:
    """Called for the time, in seconds from the source's first reading. For one thread."""

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._last = self._now = source()

    def __call__(self) -> float:
        """The time now; at least what it was at the last call."""
        reading = self._source()
        if reading > self._last:
            self._now += reading - self._last
        self._last = reading
        return self._now
