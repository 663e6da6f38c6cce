"""How long messages wait for their answers, observed when a turn of the event loop has ended.

An answer is written at the end of the turn in which it was given, together with others, so that is
the time that counts, for all of them. By the event loop's own clock.
"""

import asyncio

from rollout_dispatcher.service.connections.peer import Peer
from rollout_dispatcher.service.metrics.histogram import ValueHistogram
from rollout_dispatcher.transport.turns import turns_of


class MessageTimes:
    """Of messages that were answered, until their times are observed."""

    def __init__(self, durations: ValueHistogram) -> None:
        self._durations, self._loop = durations, asyncio.get_running_loop()
        self._answered: list[tuple[Peer, float]] = []
        turns = turns_of(self._loop)
        #: An event loop of others tells of no turns: it is asked to call.
        self._has_turns = turns is not None
        if turns is not None:
            turns.ended.append(self._observe)

    def note(self, peer: Peer, readable_since: float | None) -> None:
        """A message of this peer was answered that can be read since then; None: since now."""
        since = self._loop.time() if readable_since is None else readable_since
        if not self._answered and not self._has_turns:
            self._loop.call_soon(lambda: self._observe(self._loop.time()))
        self._answered.append((peer, since))

    def _observe(self, now: float) -> None:
        answered, self._answered = self._answered, []
        for peer, since in answered:
            self._durations.observe(now - since, peer.role)
