"""The dispatcher's side of one connection: who may say what, when.

    AWAIT_HELLO --HelloProducer--> PRODUCER --Bye--> CLOSED
         |
         +-------HelloRank-------> RANK ------Bye--> CLOSED

A rank says hello again when it has loaded a checkpoint.
A message that the table does not have raises ProtocolError, names message and state, and
changes nothing. Sans-IO: bytes go in through `get_buffers`/`received`, messages come out.
A message is read before its payload is received, since it says how that is cut up, and a frame with
a payload only when it is admitted: until then the session waits (`waits_for`), and `go_on`s.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import (
    HANDSHAKE_LIMITS,
    Admit,
    Frame,
    FrameLimits,
    FrameReader,
    at_once,
)


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


#: Messages and their payloads, as they become complete.
Heard = Iterator[tuple[m.Message, Sequence[memoryview]]]


class ServerSession:
    """Decodes what a peer says and holds it to the protocol.

    memory: gives what a sample's span is received into, for a number of bytes.
    """

    def __init__(
        self,
        limits: FrameLimits,
        memory: Callable[[int], memoryview] = lambda nbytes: memoryview(bytearray(nbytes)),
    ) -> None:
        self._memory = memory
        self.state = State.AWAIT_HELLO
        self._limits = limits
        self._reader = FrameReader(HANDSHAKE_LIMITS)
        self._message: m.Message = m.Bye()

    def get_buffer(self) -> memoryview:
        """The first of `get_buffers`."""
        return self._reader.get_buffer()

    def get_buffers(self) -> list[memoryview]:
        """Memory that the next bytes of the stream belong into, in order."""
        return self._reader.get_buffers()

    @property
    def waits_for(self) -> int:
        """Bytes of the frame that was not admitted yet; 0 when none waits."""
        return self._reader.waits_for

    @property
    def filled(self) -> int:
        """How many bytes of the current frame have arrived."""
        return self._reader.filled

    def received(self, nbytes: int, admit: Admit = at_once) -> Heard:
        """Messages now complete, each with its payload: the spans of a push, else nothing.

        Every span has memory of its own. The iterator raises ProtocolError; the connection is
        beyond use then. admit: whether a frame of so many bytes may have memory now.
        """
        return map(self._accept, self._reader.received(nbytes, self._allocate, admit))

    def go_on(self, admit: Admit = at_once) -> Heard:
        """The frame that waits is admitted; the messages now complete, as in `received`."""
        return map(self._accept, self._reader.go_on(self._allocate, admit))

    def drop(self) -> None:
        """Let go of the memory of the current frame: nothing more is read."""
        self._reader.drop()

    def _allocate(self, frame_type: int, header: memoryview, size: int) -> Sequence[memoryview]:
        self._message = message = codec.decode(Frame(frame_type, header))
        if (self.state, type(message)) not in NEXT:
            raise ProtocolError(f"{type(message).__name__} is not legal in state {self.state}")
        if isinstance(message, m.Push):
            return list(map(self._memory, message.spans(size)))
        if size:
            raise ProtocolError(f"{type(message).__name__} does not carry a payload")
        return ()

    def _accept(self, frame: Frame) -> tuple[m.Message, Sequence[memoryview]]:
        message = self._message
        if self.state is State.AWAIT_HELLO:
            self._reader.limits = self._limits
        self.state = NEXT[self.state, type(message)]
        return message, frame.parts
