"""Descriptors that have arrived on a connection, until the frames that speak of them claim them."""

import os
from collections import deque
from collections.abc import Iterable, Sequence

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.transport.descriptors.closing import CLOSER


class Arrivals:
    """In the order in which they came, at most `limit` at a time; closed unless claimed.

    kept: those that were claimed, and stay for what comes next: each with the bytes of its segment.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.kept: Sequence[tuple[int, int]] = ()
        self._waiting: deque[int] = deque()

    def put(self, descriptors: Iterable[int]) -> None:
        """These have come. Raises ProtocolError for more than may wait; all are closed then."""
        self._waiting.extend(descriptors)
        if len(self._waiting) > self._limit:
            self.close()
            raise ProtocolError(
                f"more than {self._limit} file descriptors came before a message spoke of them"
            )

    def take(self, count: int) -> list[int]:
        """The first so many, which are the caller's now. Raises ProtocolError if there are less."""
        if count > len(self._waiting):
            raise ProtocolError(
                f"a message speaks of {count} file descriptors, and {len(self._waiting)} came"
            )
        return [self._waiting.popleft() for _ in range(count)]

    def let_go(self) -> None:
        """Close those that are kept, which are known to be memory: that takes no time."""
        kept, self.kept = self.kept, ()
        for descriptor, _ in kept:
            os.close(descriptor)

    def close(self) -> None:
        """Nobody will claim those that wait."""
        self.let_go()
        waiting, self._waiting = self._waiting, deque()
        if waiting:
            CLOSER.close(waiting)

    def __del__(self) -> None:
        self.close()
