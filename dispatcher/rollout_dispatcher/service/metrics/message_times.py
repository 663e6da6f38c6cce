"""How long messages wait for their answers, observed once a turn of the event loop.

An answer is written at the end of the turn in which it was given, together with others, so it is
then that the clock is looked at, once for all of them. By the event loop's own clock.
"""

import asyncio
from functools import cache

from prometheus_client import Histogram

from rollout_dispatcher.service.connections.peer import Peer


class MessageTimes:
    """Of messages that were answered, until their times are observed."""

    def __init__(self, histogram: Histogram) -> None:
        self._of_role = cache(histogram.labels)
        self._loop = asyncio.get_running_loop()
        self._answered: list[tuple[Peer, float]] = []

    def note(self, peer: Peer, readable_since: float | None) -> None:
        """A message of this peer was answered that can be read since then; None: since now."""
        if not self._answered:
            self._loop.call_soon(self._observe)
        since = self._loop.time() if readable_since is None else readable_since
        self._answered.append((peer, since))

    def _observe(self) -> None:
        now, answered, self._answered = self._loop.time(), self._answered, []
        for peer, since in answered:
            self._of_role(peer.role).observe(now - since)
