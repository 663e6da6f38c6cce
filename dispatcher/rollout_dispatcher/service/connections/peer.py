"""One connection of the sample plane: bytes to messages, frames to bytes, deadlines.

Everything happens in the transport's callbacks, so a connection needs no task. Invariants: a peer
that breaks the protocol, stays silent or stops reading harms no other: it gets an `Error`, and its
connection ends within a deadline; so does one to which a message of ours would be out of turn. Bulk
frames are produced one at a time and only while the transport takes them, so a slow peer costs one
frame of memory and no more. A received frame has memory only as far as `Receiving` has room for it.
A peer is read from while no `Pause` is on.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from rollout_dispatcher.core.waiting import TrainerProgress
from rollout_dispatcher.errors import (
    DispatcherError,
    IllegalTransition,
    ProtocolError,
)
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import FrameLimits, frame_bytes
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.protocol.sessions import LEAVING, Received, Session, SessionState, Side
from rollout_dispatcher.protocol.slices import Slicing
from rollout_dispatcher.service.access import Rights
from rollout_dispatcher.service.connections.receiving import Receiving
from rollout_dispatcher.transport.listener import MADE_ROOM
from rollout_dispatcher.transport.memory import uninitialised
from rollout_dispatcher.transport.plain import StreamProtocol

log = logging.getLogger(__name__)


def _host(connected: socket.socket | None) -> str:
    if connected is None or connected.family == socket.AF_UNIX:
        return ""
    with suppress(OSError):  # it is gone already
        return str(connected.getpeername()[0])
    return ""


#: After an Error frame, how long to wait for the peer to read it and hang up.
GOODBYE_SECONDS = 2.0

#: Bulk that is written to one peer before others get their turn: about a millisecond.
BULK_BYTES_A_TURN = 2 * 1024 * 1024

#: Produces the buffers of the next bulk frame when there is room for it; None: no longer needed.
Job = Callable[[], Sequence[Buffer] | None]


class Pause(Enum):
    """A reason for which a peer is not read from."""

    #: Too many of its messages wait for an answer.
    UNANSWERED = auto()
    #: It does not read, and messages of a producer would only cause more writing.
    UNREAD = auto()
    #: Its next frame waits until those of others have been received.
    NO_ROOM = auto()
    #: Its frame waits until the journal has written what others have sent.
    BEHIND = auto()


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Deadlines in seconds, and the largest frame."""

    frame: FrameLimits
    handshake_timeout: float
    write_timeout: float


class PeerListener(Protocol):
    """Handles the events of peers; `receiving` has room for the frames of all of them."""

    receiving: Receiving

    def admits(self) -> DispatcherError | None:
        """The error with which a new connection is refused, if it is."""

    def connected(self, peer: "Peer") -> None:
        """A connection was made."""

    def on_message(self, peer: "Peer", message: m.Message, spans: Sequence[memoryview]) -> None:
        """A peer sent a legal message, a push with its samples' spans.

        Raises DispatcherError to end this connection with it.
        """

    def lost(self, peer: "Peer", reason: str) -> None:
        """A connection is over; `reason` is `bye` for a deliberate goodbye."""


class Peer(StreamProtocol):
    """The dispatcher's end of one connection."""

    def __init__(
        self, listener: PeerListener, limits: PeerLimits, clock: Callable[[], float]
    ) -> None:
        self._listener = listener
        self._limits = limits
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._jobs: deque[Job] = deque()
        self._paused = False
        #: Bytes of bulk that may be written before others get their turn.
        self._share = BULK_BYTES_A_TURN
        self._pauses: set[Pause] = set()
        #: Whether `receiving` counts a frame of ours.
        self._counted = False
        self._ending: str | None = None
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self.client_id = ""
        #: Its address; empty of a Unix socket.
        self.host = ""
        #: By the token that its last hello has shown.
        self.rights = Rights.ALL
        self.role = "unknown"
        #: Whether its hello was answered; a DP rank gets nothing before that.
        self.welcomed = False
        #: When its last message was complete: a frame that drips is silence.
        self.last_received = clock()
        #: By its hello: whether it opens payload stores, and gets the trainer's progress.
        self.opens_stores = self.wants_feedback = False
        #: The slices that it gets of samples that it trains with others; None: the whole of them.
        self.slicing: Slicing | None = None
        #: The trainer's progress that it was sent last.
        self.progress_sent: TrainerProgress | None = None

    # -- called by the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or refuse it with an error."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.host = _host(transport.get_extra_info("socket"))
        # Only now: during a TLS handshake there is nothing to receive into it.
        self._session = Session(Side.DISPATCHER, self._limits.frame, uninitialised)
        refusal = self._listener.admits()
        self._listener.connected(self)
        if refusal is not None:
            self.fail(refusal)
            return
        timeout = self._limits.handshake_timeout
        self._set_deadline("handshake", timeout, lambda: self._too_slow("hello", timeout))

    def get_buffers(self) -> list[memoryview]:
        """Memory for the next bytes, which are discarded once the connection ends."""
        if self._ending is not None:
            return [memoryview(bytearray(65536))]
        return self._session.get_buffers()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle what became complete."""
        if self._ending is not None:
            return
        self._take(self._session.received(nbytes, self._admit))

    def eof_received(self) -> bool:
        """The peer will send nothing more."""
        self._end(self._reason("eof"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._jobs.clear()
        self._transport = None  # each holds the other
        self._receive_no_more()
        reason = self._ending or self._reason("eof" if exc is None else "reset")
        self._ending = reason
        self._listener.lost(self, reason)

    def pause_writing(self) -> None:
        """The peer reads too slowly: write no more bulk, and set a deadline."""
        self._paused = True
        if self.role != "rank":  # messages of ranks make room
            self._pause(Pause.UNREAD)
        self._expect_reading()

    def resume_writing(self) -> None:
        """There is room again."""
        self._paused = False
        self._clear_deadline("write")
        self._unpause(Pause.UNREAD)
        self._pump()

    # -- called by the service --------------------------------------------------------------

    def send(self, *messages: m.Message) -> None:
        """Write small control messages, ahead of bulk frames that wait."""
        if self._transport is None or self._ending is not None:
            return
        try:
            frames = b"".join(map(self._session.send, messages))
        except IllegalTransition as bug:
            self._sent_out_of_turn(bug)
        else:
            self._transport.write(frames)

    def write(self, frame: bytes) -> None:
        """Write a control frame that was encoded before."""
        if self._transport is not None and self._ending is None and self._may_send(frame):
            self._transport.write(frame)

    def enqueue(self, job: Job) -> None:
        """Write a bulk frame when its turn comes."""
        if self._ending is None:
            self._jobs.append(job)
            self._pump()

    def hold(self) -> None:
        """Read nothing more from the peer until `go_on`."""
        self._pause(Pause.UNANSWERED)

    def go_on(self) -> None:
        """Its answers are out."""
        self._unpause(Pause.UNANSWERED)

    @property
    def held(self) -> bool:
        """Whether it is not read from."""
        return bool(self._pauses)

    @property
    def is_behind(self) -> bool:
        """Whether it has not read what was written to it before."""
        return self._paused

    @property
    def filled(self) -> int | None:
        """Bytes of its frame that have arrived; None while reading is paused here."""
        ours = Pause.UNANSWERED in self._pauses or Pause.BEHIND in self._pauses
        return None if ours else self._session.filled

    def let_in(self) -> None:
        """Its frame may have memory, in a later turn of the event loop."""
        self._counted = True
        asyncio.get_running_loop().call_soon(self._receive_on)

    def pause_reading(self) -> None:
        """Receive nothing more of its frame until `resume_reading`."""
        self._pause(Pause.BEHIND)

    def resume_reading(self) -> None:
        """The journal takes more."""
        self._unpause(Pause.BEHIND)

    def forget(self) -> None:
        """Drop queued bulk frames: the peer sends another hello, and gets them anew."""
        self.welcomed = False
        self._jobs.clear()

    def fail(self, error: DispatcherError) -> None:
        """Send an error, and end the connection."""
        if self._ending is not None or self._transport is None:
            return
        self.send(m.Error(code=error.code, message=str(error), retriable=error.retriable))
        self._jobs.clear()
        self._ending = error.code
        self._receive_no_more()
        fields = {"event": "connection-ended", "peer": str(self), "kind": error.code}
        log.info("connection of %s ended: %s", self, error, extra=fields)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        # Closing at once could reset the connection before the peer has read the error.
        self._set_deadline("goodbye", GOODBYE_SECONDS, self._transport.abort)

    def acknowledge_bye(self) -> None:
        """Answer a goodbye: everything that the peer sent before it is safe."""
        self.send(m.Bye())
        self.close("bye")

    def close(self, reason: str = "closed") -> None:
        """End the connection once what is written has been sent."""
        if self._ending is None:
            self._end(reason)

    def make_room(self, error: DispatcherError) -> None:
        """End a connection that is pending, at once: others need its place."""
        if self._transport is None:
            return
        self.send(m.Error(code=error.code, message=str(error), retriable=error.retriable))
        self._end(MADE_ROOM)
        if self._transport is not None:
            self._transport.abort()

    def hang_up(self) -> None:
        """End the connection without an error; `lost` follows within a deadline."""
        self._end("closed")

    def __str__(self) -> str:
        at = f" at {self.host}" if self.host else ""
        return f"{self.role} {self.client_id}".strip() + at

    # -- inside -----------------------------------------------------------------------------

    def _handle(self, message: m.Message, spans: Sequence[memoryview]) -> None:
        # By its type: pydantic's classes take 0.7 us to say that a message is none of theirs.
        if type(message) in (m.HelloProducer, m.HelloRank):
            assert isinstance(message, m.Hello)
            self._introduce(message)
        self._listener.on_message(self, message, spans)

    def _introduce(self, message: m.Hello) -> None:
        self._clear_deadline("handshake")
        if self.client_id not in ("", message.client_id):
            raise ProtocolError(f"client {self.client_id} calls itself {message.client_id} now")
        self.client_id = message.client_id
        self.role = "producer" if isinstance(message, m.HelloProducer) else "rank"
        self.opens_stores = message.opens_stores
        self.wants_feedback = isinstance(message, m.HelloProducer) and message.feedback
        self.slicing = message.slicing if isinstance(message, m.HelloRank) else None

    def _take(self, messages: Received) -> None:
        """Handle what became complete; a frame has room until its message was handled."""
        try:
            for message, spans in messages:
                self.last_received = self._clock()
                self._handle(message, spans)
                if self._counted:
                    self._counted = False
                    self._listener.receiving.done(self)
                if self._ending is not None:
                    return
        except DispatcherError as error:
            self.fail(error)

    def _admit(self, nbytes: int) -> bool:
        """Whether there is room for a frame; else nothing is read until there is."""
        # A rank's frames have no payload, and are always received: they free memory and room.
        if self.role != "producer":
            return True
        receiving = self._listener.receiving
        self._counted = receiving.claim(self, nbytes)
        if self._counted:
            return True
        receiving.wait(self, nbytes)
        self._pause(Pause.NO_ROOM)
        return False

    def _receive_on(self) -> None:
        if self._ending is None:
            self._take(self._session.go_on(self._admit))
        if not self._session.waits_for:
            self._unpause(Pause.NO_ROOM)

    def _receive_no_more(self) -> None:
        """Release room and memory; further bytes are read and discarded."""
        self._session.drop()
        self._listener.receiving.done(self)
        for pause in list(self._pauses):
            self._unpause(pause)

    def _pause(self, why: Pause) -> None:
        self._pauses.add(why)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _unpause(self, why: Pause) -> None:
        self._pauses.discard(why)
        if self._pauses or self._transport is None or self._transport.is_closing():
            return
        self._transport.resume_reading()

    def _reason(self, otherwise: str) -> str:
        """The reason of the end: `bye` after a goodbye, answered or not."""
        state = self._session.state
        return "bye" if state in LEAVING or state is SessionState.CLOSED else otherwise

    def _end(self, reason: str) -> None:
        """Close once what is written has been sent, or the deadline for it has passed."""
        self._ending = self._ending or reason
        self._jobs.clear()
        self._receive_no_more()
        if self._transport is not None:
            self._transport.close()
            self._set_deadline("goodbye", GOODBYE_SECONDS, self._transport.abort)

    def _pump(self) -> None:
        """Write bulk frames while there is room; those beyond a turn's share in the next turn."""
        while self._jobs and not self._paused and self._share > 0 and self._transport is not None:
            frame = self._jobs.popleft()()
            if frame is not None and self._may_send(frame[0]):
                self._transport.writelines(frame)
                self._share -= frame_bytes(frame[0])
                if self._share <= 0:
                    asyncio.get_running_loop().call_soon(self._pump_on)

    def _pump_on(self) -> None:
        self._share = BULK_BYTES_A_TURN
        self._pump()

    def _may_send(self, frame: Buffer) -> bool:
        try:
            self._session.sent(frame)
        except IllegalTransition as bug:
            self._sent_out_of_turn(bug)
            return False
        return True

    def _sent_out_of_turn(self, bug: IllegalTransition) -> None:
        """A bug of ours: the peer gets the error, and messages to others go on."""
        log.error(
            "bug: a message to %s was out of protocol order; the connection is closed: %s",
            self,
            bug,
            extra={"event": "bug", "peer": str(self)},
        )
        self.fail(bug)

    def _too_slow(self, what: str, timeout: float) -> None:
        self.fail(ProtocolError(f"no {what} within {timeout:g} s"))

    def _expect_reading(self) -> None:
        """Give the peer until the deadline to read some bytes; slow is no fault."""
        if self._transport is not None:
            unread = self._transport.get_write_buffer_size()
            timeout = self._limits.write_timeout
            self._set_deadline("write", timeout, lambda: self._check_reading(unread, timeout))

    def _check_reading(self, unread: int, timeout: float) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() < unread:
            self._expect_reading()
            return
        fields = {"event": "write-timeout", "peer": str(self)}
        text = "%s has read nothing for %g s; closing its connection"
        log.warning(text, self, timeout, extra=fields)
        self._ending = "write-timeout"
        self._transport.abort()

    def _set_deadline(self, name: str, seconds: float, then: Callable[[], object]) -> None:
        self._clear_deadline(name)
        self._deadlines[name] = asyncio.get_running_loop().call_later(seconds, then)

    def _clear_deadline(self, name: str) -> None:
        if (handle := self._deadlines.pop(name, None)) is not None:
            handle.cancel()
