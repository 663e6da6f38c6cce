"""One connection's conversation: the messages that each side may send. For all roles; no IO here.

    AWAIT_HELLO --HelloProducer--> PRODUCER_GREETS --WelcomeProducer--> PRODUCER
         |                                |                                |
         |                                +-----Bye--> PRODUCER_LEAVES <---+ Bye
         |                                                    |
         |                                                    +--------Bye (answered)--> CLOSED
         |
         +-----HelloRank--> RANK_GREETS --WelcomeRank--> RANK --HelloRank--> RANK_RESUMES
                                                           ^                      |
                                                           +-----WelcomeRank------+
    A rank sends Bye as a producer does. An Error of the dispatcher's closes in any state.

A session is one `Side` of it. Both sides have the same states, and each changes its own with the
messages that it sends and receives, so they differ while a message is on its way: hence a table for
each side and direction. A message that a table does not have changes nothing: to receive one is the
peer's fault (ProtocolError), to send one our own (IllegalTransition).

Bytes go in through `get_buffers` and `received`, messages come out. A message is decoded before its
payload is received, as it says how that is cut up, and a frame with a payload is received only once
it is admitted: until then the session waits (`waits_for`), and `go_on`s.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

from rollout_dispatcher.errors import IllegalTransition, ProtocolError
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


class Side(StrEnum):
    """Whose end of a connection it is."""

    DISPATCHER = "dispatcher"
    PRODUCER = "producer"
    RANK = "rank"


class SessionState(StrEnum):
    """Where a conversation stands.

    *_GREETS: hello is sent, and nothing else before the welcome. RANK_RESUMES: hello is sent again,
    as a checkpoint was loaded. *_LEAVES: Bye is sent and not answered yet.
    """

    AWAIT_HELLO = "await-hello"
    PRODUCER_GREETS = "producer-greets"
    PRODUCER = "producer"
    PRODUCER_LEAVES = "producer-leaves"
    RANK_GREETS = "rank-greets"
    RANK = "rank"
    RANK_RESUMES = "rank-resumes"
    RANK_LEAVES = "rank-leaves"
    CLOSED = "closed"


S = SessionState
Kinds = tuple[type[m.Message], ...]
Table = dict[tuple[SessionState, type[m.Message]], SessionState]

#: Messages from and to welcomed peers.
FROM_PRODUCER: Kinds = (
    m.Push, m.CloseGroup, m.EndPhase, m.EndStream, m.Freed, m.Swept, m.Ping,
)  # fmt: skip
TO_PRODUCER: Kinds = (
    m.Pushed, m.Blocked, m.Resend, m.SchemaKnown, m.Feedback, m.Dropped, m.Advice, m.Free, m.Sweep,
    m.Pong,
)  # fmt: skip
FROM_RANK: Kinds = (
    m.Demand, m.PolicyVersion, m.Prepared, m.Unresolved, m.Commit, m.Finish, m.CheckpointSaved,
    m.StepTimes, m.Freed, m.Swept, m.Ping,
)  # fmt: skip
TO_RANK: Kinds = (
    m.StepHeader, m.MicroBatch, m.StepWithdrawn, m.Release, m.LastStep, m.Advice, m.End, m.Free,
    m.Sweep, m.Pong,
)  # fmt: skip

#: Messages of a client after its Bye: the last client is asked to release the objects left.
ANSWERS: Kinds = (m.Freed, m.Swept)
#: Where the client has sent Bye.
LEAVING = frozenset({S.PRODUCER_LEAVES, S.RANK_LEAVES})
_OPEN = [state for state in S if state is not S.CLOSED]


def _stay(kinds: Kinds, *states: SessionState) -> Table:
    """These messages leave a conversation in the state in which it is."""
    return {(state, kind): state for state in states for kind in kinds}


_PRODUCER_SENDS: Table = {
    (S.AWAIT_HELLO, m.HelloProducer): S.PRODUCER_GREETS,
    (S.PRODUCER_GREETS, m.Bye): S.PRODUCER_LEAVES,
    (S.PRODUCER, m.Bye): S.PRODUCER_LEAVES,
    **_stay(FROM_PRODUCER, S.PRODUCER),
    **_stay(ANSWERS, S.PRODUCER_LEAVES),
}
_RANK_SENDS: Table = {
    (S.AWAIT_HELLO, m.HelloRank): S.RANK_GREETS,
    (S.RANK, m.HelloRank): S.RANK_RESUMES,
    (S.RANK_GREETS, m.Bye): S.RANK_LEAVES,
    (S.RANK, m.Bye): S.RANK_LEAVES,
    (S.RANK_RESUMES, m.Bye): S.RANK_LEAVES,
    **_stay(FROM_RANK, S.RANK),
    **_stay((m.Ping,), S.RANK_RESUMES),
    **_stay(ANSWERS, S.RANK_LEAVES),
}
#: The same in both directions.
_ERRORS: Table = {(state, m.Error): S.CLOSED for state in _OPEN}
_TO_CLIENTS: Table = {
    **_ERRORS,
    (S.PRODUCER_GREETS, m.WelcomeProducer): S.PRODUCER,
    (S.PRODUCER_LEAVES, m.Bye): S.CLOSED,
    **_stay(TO_PRODUCER, S.PRODUCER),
    **_stay((m.WelcomeProducer, *TO_PRODUCER), S.PRODUCER_LEAVES),
    (S.RANK_GREETS, m.WelcomeRank): S.RANK,
    (S.RANK_RESUMES, m.WelcomeRank): S.RANK,
    (S.RANK_LEAVES, m.Bye): S.CLOSED,
    **_stay(TO_RANK, S.RANK),
    **_stay((m.WelcomeRank, *TO_RANK), S.RANK_LEAVES),
    **_stay((m.Pong,), S.RANK_RESUMES),
}

#: The messages that each side may send.
SENDS: dict[Side, Table] = {
    Side.PRODUCER: _PRODUCER_SENDS,
    Side.RANK: _RANK_SENDS,
    Side.DISPATCHER: _TO_CLIENTS,
}
#: The messages that each side may receive: those of the other, also on the way to a resuming rank.
RECEIVES: dict[Side, Table] = {
    Side.PRODUCER: {key: then for key, then in _TO_CLIENTS.items() if "rank" not in key[0]},
    Side.RANK: {
        **{key: then for key, then in _TO_CLIENTS.items() if "producer" not in key[0]},
        **_stay(TO_RANK, S.RANK_RESUMES),
    },
    Side.DISPATCHER: {**_PRODUCER_SENDS, **_RANK_SENDS},
}


def _by_state(table: Table) -> dict[SessionState, dict[type[m.Message], SessionState]]:
    found: dict[SessionState, dict[type[m.Message], SessionState]] = {state: {} for state in S}
    for (state, kind), after in table.items():
        found[state][kind] = after
    return found


#: Messages and their payloads, as they become complete.
Received = Iterator[tuple[m.Message, Sequence[memoryview]]]


class Session:
    """One side of a conversation: decodes the peer's messages, encodes ours.

    limits: of frames after the peer's hello or welcome. memory: allocates a piece of a payload, for
    a number of bytes.
    """

    def __init__(
        self,
        side: Side,
        limits: FrameLimits,
        memory: Callable[[int], memoryview] = lambda nbytes: memoryview(bytearray(nbytes)),
    ) -> None:
        self._sends, self._receives = _by_state(SENDS[side]), _by_state(RECEIVES[side])
        self._enter(SessionState.AWAIT_HELLO)
        self._memory, self._limits = memory, limits
        self._reader = FrameReader(HANDSHAKE_LIMITS)
        #: Memory that the next bytes of the stream belong into, in order.
        self.get_buffers = self._reader.get_buffers
        self._message: m.Message = m.Bye()

    # -- sending

    def send(self, message: m.Message, payload_size: int = 0) -> bytes:
        """The frame of a message that is sent now, up to its payload."""
        if self._may_send.get(type(message)) is not self.state:
            self._note(type(message))
        return codec.encode(message, payload_size)

    def sent(self, frame: bytes | bytearray | memoryview) -> None:
        """Note that a frame is sent that was encoded before."""
        kind = m.MESSAGES[frame[2]]
        if self._may_send.get(kind) is not self.state:  # nearly all leave it as it is
            self._note(kind)

    def _note(self, kind: type[m.Message]) -> None:
        after = self._may_send.get(kind)
        if after is None:
            raise IllegalTransition(self.state, f"saying {kind.__name__}")
        self._enter(after)

    def _enter(self, state: SessionState) -> None:
        self.state = state
        self._may_send, self._may_receive = self._sends[state], self._receives[state]

    # -- receiving

    def get_buffer(self) -> memoryview:
        """The first of `get_buffers`."""
        return self._reader.get_buffer()

    @property
    def waits_for(self) -> int:
        """Bytes of the frame that was not admitted yet; 0 when none waits."""
        return self._reader.waits_for

    @property
    def filled(self) -> int:
        """How many bytes of the current frame have arrived."""
        return self._reader.filled

    def received(self, nbytes: int, admit: Admit = at_once) -> Received:
        """Messages now complete, each with its payload in as many pieces as `Message.spans` says.

        Every piece has memory of its own. The iterator raises ProtocolError; the connection is
        beyond use then. admit: whether a frame of so many bytes may have memory now.
        """
        return map(self._accept, self._reader.received(nbytes, self._allocate, admit))

    def go_on(self, admit: Admit = at_once) -> Received:
        """The frame that waits is admitted; the messages now complete, as in `received`."""
        return map(self._accept, self._reader.go_on(self._allocate, admit))

    def drop(self) -> None:
        """Free the memory of the current frame: nothing more is read."""
        self._reader.drop()

    def _allocate(self, code: int, header: memoryview, size: int) -> Sequence[memoryview]:
        kind = m.MESSAGES.get(code)
        if kind is not None:
            if kind not in self._may_receive:
                raise self._illegal(kind)
            if issubclass(kind, m.Hello):  # first: what is newer must not hide what is wrong
                codec.check_version(header, kind.__name__)
        self._message = message = codec.decode(Frame(code, header))
        return list(map(self._memory, message.spans(size)))

    def _accept(self, frame: Frame) -> tuple[m.Message, Sequence[memoryview]]:
        message = self._message
        after = self._may_receive.get(type(message))
        if after is not self.state:  # nearly all leave it as it is
            if after is None:  # a message was sent since the header came
                raise self._illegal(type(message))
            self._enter(after)
            self._reader.limits = self._limits
        return message, frame.parts

    def _illegal(self, kind: type[m.Message]) -> ProtocolError:
        return ProtocolError(f"{kind.__name__} is not legal in state {self.state}")
