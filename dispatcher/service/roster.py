"""The roster: which connection speaks for which client.

A client has one connection. When it connects again, the newer connection speaks for it and the
older one is closed, whatever it may still say.
"""

from dataclasses import dataclass

from dispatcher.service.peer import Peer
from dispatcher.wire import messages as m


@dataclass(frozen=True, slots=True)
class Seat:
    """A connected DP rank."""

    dp_rank: int
    peer: Peer


class Roster:
    """Connections by what they said they are."""

    def __init__(self) -> None:
        self.peers: set[Peer] = set()
        self.producers: dict[str, Peer] = {}
        self.seats: dict[str, Seat] = {}
        self._enders: dict[str, bool] = {}

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

    def seat(self, client_id: str, dp_rank: int, peer: Peer) -> None:
        """This connection speaks for this DP rank now."""
        before = self.seats.get(client_id)
        self.seats[client_id] = Seat(dp_rank, peer)
        if before is not None and before.peer is not peer:
            before.peer.close()

    def unseat(self, client_id: str) -> Peer | None:
        """Nobody speaks for this client any more; returns who did."""
        seat = self.seats.pop(client_id, None)
        return None if seat is None else seat.peer

    def rank(self, client_id: str) -> Peer | None:
        """The connection of a DP rank's client, once it is welcomed."""
        seat = self.seats.get(client_id)
        return seat.peer if seat is not None and seat.peer.welcomed else None

    def to_producer(self, client_id: str, message: m.Message) -> None:
        """Tell a producer, if it is connected."""
        if (peer := self.producers.get(client_id)) is not None:
            peer.send(message)
