"""The connections: which connection speaks for which client.

A client has one connection. When it connects again, the newer connection speaks for it and the
older one is closed. Invariant: a DP rank's connection is attached only in the generation that the
core has decided on; messages of a detached one are ignored, though it may wait for its `Error`.
"""

from dataclasses import dataclass

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.connections.clients import Clients
from rollout_dispatcher.service.connections.peer import Peer
from rollout_dispatcher.transport.listener import Place

#: Producers that ended the stream and are waited for until they know; far above any fleet.
MAX_ENDERS = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class RankConnection:
    """A connected DP rank; one for each hello, though connection and rank are the same."""

    dp_rank: int
    peer: Peer


class Connections:
    """Connections by role and client."""

    def __init__(self) -> None:
        self.peers: set[Peer] = set()
        self.clients = Clients()
        self._pending: dict[Peer, Place] = {}
        self.producers: dict[str, Peer] = {}
        self.ranks: dict[str, RankConnection] = {}
        self._enders: dict[str, None] = {}
        self._unanswered: set[str] = set()  # of those
        self._hellos: dict[str, Peer] = {}

    # -- connections, whoever they speak for

    def connected(self, peer: Peer, place: Place) -> None:
        """A connection is there; it has this place until its hello."""
        self.peers.add(peer)
        self._pending[peer] = place

    def is_pending(self, peer: Peer) -> bool:
        """Whether its hello is not there yet."""
        return peer in self._pending

    def introduced(self, peer: Peer) -> None:
        """Its hello was accepted."""
        self._pending.pop(peer).leave()

    def lost(self, peer: Peer) -> None:
        """A connection is over."""
        self.peers.discard(peer)
        if (place := self._pending.pop(peer, None)) is not None:
            place.leave()

    @property
    def num_introduced(self) -> int:
        """Connections after their hello."""
        return len(self.peers) - len(self._pending)

    # -- the end of the stream

    def ends(self, client_id: str) -> None:
        """This producer ends the stream, and waits for the confirmation."""
        self._enders[client_id] = None
        self._unanswered.add(client_id)
        if len(self._enders) > MAX_ENDERS:
            oldest = next(iter(self._enders))
            del self._enders[oldest]
            self._unanswered.discard(oldest)

    def answered(self, client_id: str) -> None:
        """All messages of this producer were answered on its connection."""
        self._unanswered.discard(client_id)

    def left(self, client_id: str, *, for_good: bool) -> None:
        """A producer is gone; without a goodbye the answer may have been lost with it."""
        if for_good:
            self._enders.pop(client_id, None)
            self._unanswered.discard(client_id)
        elif client_id in self._enders:
            self._unanswered.add(client_id)

    @property
    def end_is_known(self) -> bool:
        """Whether the end is confirmed to every producer that ended the stream."""
        return not self._unanswered

    # -- DP ranks

    def decided_hello(self, peer: Peer) -> None:
        """The core has decided on this DP rank's hello: its connection is attached or refused."""
        self._hellos[peer.client_id] = peer

    def take_hello(self, client_id: str) -> Peer:
        """The connection on whose hello was decided, once."""
        return self._hellos.pop(client_id)

    def attach(self, peer: Peer, dp_rank: int) -> RankConnection:
        """This connection speaks for its client, as this DP rank, now."""
        before = self.ranks.get(peer.client_id)
        self.ranks[peer.client_id] = attached = RankConnection(dp_rank, peer)
        self.clients.joined(peer.client_id, "rank", peer.host, peer, dp_rank)
        if before is not None and before.peer is not peer:
            before.peer.close()
        return attached

    def rank_of(self, peer: Peer) -> RankConnection | None:
        """The DP rank that this connection speaks for, if it does."""
        rank = self.ranks.get(peer.client_id)
        return rank if rank is not None and rank.peer is peer else None

    def is_attached(self, rank: RankConnection) -> bool:
        """Whether no later hello took its place, and it was not detached."""
        return self.ranks.get(rank.peer.client_id) is rank

    def detach(self, *client_ids: str) -> list[Peer]:
        """Detach these clients; returns their connections."""
        ranks = (self.ranks.pop(client_id, None) for client_id in client_ids)
        return [rank.peer for rank in ranks if rank is not None]

    def welcomed_rank(self, client_id: str) -> RankConnection | None:
        """The connection of a DP rank's client, once it is welcomed."""
        rank = self.ranks.get(client_id)
        return rank if rank is not None and rank.peer.welcomed else None

    def to_producer(self, client_id: str, message: m.Message) -> None:
        """Send to a producer, if it is connected."""
        if (peer := self.producers.get(client_id)) is not None:
            peer.send(message)
