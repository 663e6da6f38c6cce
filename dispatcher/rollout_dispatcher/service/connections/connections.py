"""The connections: which connection speaks for which client.

A client has one connection. When it connects again, the newer connection speaks for it and the
older one is closed, whatever it may still say. Invariant: a DP rank's connection has a seat only in
the generation that the core has decided on; once unseated it is heard no more, though it may wait
to be told so.
"""

from dataclasses import dataclass

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.connections.peer import Peer


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """A connected DP rank; one for each hello, though connection and rank are the same."""

    dp_rank: int
    peer: Peer


class Connections:
    """Connections by what they said they are."""

    def __init__(self) -> None:
        self.peers: set[Peer] = set()
        self.producers: dict[str, Peer] = {}
        self.seats: dict[str, Seat] = {}
        self._enders: dict[str, bool] = {}
        self._hellos: dict[str, Peer] = {}

    # -- the end of the stream

    def ends(self, client_id: str) -> None:
        """This producer ends the stream, and waits to hear that it was heard."""
        self._enders[client_id] = False

    def answered(self, client_id: str) -> None:
        """Everything that this producer has said was answered on its connection."""
        if client_id in self._enders:
            self._enders[client_id] = True

    def left(self, client_id: str, *, for_good: bool) -> None:
        """A producer is gone; unless it said goodbye, the answer may have been lost with it."""
        if for_good:
            self._enders.pop(client_id, None)
        elif client_id in self._enders:
            self._enders[client_id] = False

    @property
    def end_is_known(self) -> bool:
        """Whether every producer that ended the stream has been told so."""
        return all(self._enders.values())

    # -- DP ranks

    def said_hello(self, peer: Peer) -> None:
        """The core has decided on what this DP rank's connection said: it is seated or refused."""
        self._hellos[peer.client_id] = peer

    def take_hello(self, client_id: str) -> Peer:
        """The connection on whose hello was decided, once."""
        return self._hellos.pop(client_id)

    def seat(self, peer: Peer, dp_rank: int) -> Seat:
        """This connection speaks for its client, as this DP rank, now."""
        before = self.seats.get(peer.client_id)
        self.seats[peer.client_id] = seat = Seat(dp_rank, peer)
        if before is not None and before.peer is not peer:
            before.peer.close()
        return seat

    def seat_of(self, peer: Peer) -> Seat | None:
        """The DP rank that this connection speaks for, if it does."""
        seat = self.seats.get(peer.client_id)
        return seat if seat is not None and seat.peer is peer else None

    def holds(self, seat: Seat) -> bool:
        """Whether nobody has said hello in this one's place since, and it was not unseated."""
        return self.seats.get(seat.peer.client_id) is seat

    def unseat(self, *client_ids: str) -> list[Peer]:
        """Nobody speaks for these clients any more; returns who did."""
        seats = (self.seats.pop(client_id, None) for client_id in client_ids)
        return [seat.peer for seat in seats if seat is not None]

    def rank(self, client_id: str) -> Seat | None:
        """The seat of a DP rank's client, once it is welcomed."""
        seat = self.seats.get(client_id)
        return seat if seat is not None and seat.peer.welcomed else None

    def to_producer(self, client_id: str, message: m.Message) -> None:
        """Tell a producer, if it is connected."""
        if (peer := self.producers.get(client_id)) is not None:
            peer.send(message)
