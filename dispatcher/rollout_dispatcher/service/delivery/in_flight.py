"""Descriptors that are on their way to DP ranks: the kernel has them, in nobody's table.

It allows a user who is not root as many as one process may have open files, all its processes
together, and fails writes beyond (ETOOMANYREFS). So what was sent is counted until it is read.
"""

from weakref import WeakKeyDictionary

from rollout_dispatcher.protocol.messages.ranks import MAX_SEGMENTS
from rollout_dispatcher.service.connections.peer import Peer


class InFlight:
    """Counts descriptors that were sent to peers, at most `limit` at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sent: WeakKeyDictionary[Peer, int] = WeakKeyDictionary()
        #: Never less than all of `_sent`, which is summed only where this comes near the limit.
        self._count = 0

    @property
    def left(self) -> int:
        """How many may go along with one frame now."""
        if self._limit - self._count < MAX_SEGMENTS:
            self._recount()
        return min(self._limit - self._count, MAX_SEGMENTS)

    def sent(self, peer: Peer, count: int) -> None:
        """So many more are on their way."""
        self._sent[peer] = self._sent.get(peer, 0) + count
        self._count += count

    def _recount(self) -> None:
        """Leave out who is gone, and if that is not enough who has read all: a system call each."""
        self._count = sum(self._sent.values())
        if self._limit - self._count < MAX_SEGMENTS:
            for peer in [peer for peer in self._sent if peer.has_read_all]:
                self._count -= self._sent.pop(peer)
