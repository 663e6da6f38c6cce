"""The dispatcher's side of one connection: who may say what, when.

    AWAIT_HELLO --HelloProducer--> PRODUCER --Bye--> CLOSED
         |
         +-------HelloRank-------> RANK ------Bye--> CLOSED

A rank says hello again when it has loaded a checkpoint.
A message that the table does not have raises ProtocolError, names message and state, and
changes nothing. Sans-IO: bytes go in through `get_buffer`/`received`, messages come out.
"""

from collections.abc import Iterator
from enum import StrEnum

from dispatcher.errors import ProtocolError
from dispatcher.wire import messages as m
from dispatcher.wire.frame import HANDSHAKE_LIMITS, Frame, FrameLimits, FrameReader


class State(StrEnum):
    """Where a connection stands."""

    AWAIT_HELLO = "await-hello"
    PRODUCER = "producer"
    RANK = "rank"
    CLOSED = "closed"


NEXT: dict[tuple[State, type[m.Message]], State] = {
    (State.AWAIT_HELLO, m.HelloProducer): State.PRODUCER,
    (State.AWAIT_HELLO, m.HelloRank): State.RANK,
    **{
        (State.PRODUCER, kind): State.PRODUCER
        for kind in (m.Push, m.CloseGroup, m.EndPhase, m.EndStream, m.Ping)
    },
    **{
        (State.RANK, kind): State.RANK
        for kind in (
            m.HelloRank,
            m.Demand,
            m.PolicyVersion,
            m.Prepared,
            m.Commit,
            m.CheckpointSaved,
            m.Ping,
        )
    },
    (State.PRODUCER, m.Bye): State.CLOSED,
    (State.RANK, m.Bye): State.CLOSED,
}


class ServerSession:
    """Decodes what a peer says and holds it to the protocol."""

    def __init__(self, limits: FrameLimits) -> None:
        self.state = State.AWAIT_HELLO
        self._limits = limits
        self._reader = FrameReader(HANDSHAKE_LIMITS)

    def get_buffer(self) -> memoryview:
        """Memory that the next bytes of the stream belong into."""
        return self._reader.get_buffer()

    def received(self, nbytes: int) -> Iterator[tuple[m.Message, memoryview]]:
        """Messages now complete, each with its payload (empty if it has none).

        The iterator raises ProtocolError; the connection is beyond use then.
        """
        return map(self._accept, self._reader.received(nbytes))

    def _accept(self, frame: Frame) -> tuple[m.Message, memoryview]:
        message = m.decode(frame)
        after = NEXT.get((self.state, type(message)))
        if after is None:
            raise ProtocolError(f"{type(message).__name__} is not legal in state {self.state}")
        if frame.payload and not isinstance(message, m.Push):
            raise ProtocolError(f"{type(message).__name__} does not carry a payload")
        if self.state is State.AWAIT_HELLO:
            self._reader.limits = self._limits
        self.state = after
        return message, frame.payload
