"""The interface of a role's core to its connection, for producers and DP ranks.

A core keeps its state over all connections of its client. It has no socket, clock or thread: time
is an argument, and threads that share a core guard it.

`Heartbeat` decides when to ping and when to give a connection up, `Backoff` how long to wait before
the next attempt.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.protocol.sessions import Side
from rollout_dispatcher.transport.memory import Memory, uninitialised

#: A message to send and the buffers of its payload.
Outgoing = tuple[m.Message, Sequence[Buffer]]


class ClientCore(Protocol):
    """One role's side of the protocol.

    token: the secret in `hello`, set before every connection.
    """

    token: str | None

    def hello(self) -> m.Message:
        """The first message of a connection: all state that a lost one may not have delivered."""

    def receive(self, message: m.Message, payload: memoryview, now: float) -> None:
        """Handle a message, the welcome first.

        Raises ProtocolError for a message out of turn, or the ConnectionError or DispatcherError
        that the message reports.
        """

    def take_messages(self, now: float) -> Iterable[Outgoing]:
        """Messages to send now, in order; each counts as sent once yielded."""

    def take_answers(self) -> Iterable[Outgoing]:
        """Answers to requests, which may be sent after the goodbye too."""

    def ping(self) -> m.Ping:
        """A Ping to send at once."""

    def wait(self, now: float) -> float | None:
        """Seconds until a delayed message is due; None if there is none."""

    def lost(self) -> None:
        """The connection is lost: the next hello reports the state."""

    @property
    def finished(self) -> bool:
        """Whether the client's work is done, up to its confirmation by the dispatcher."""

    @property
    def unconfirmed(self) -> str | None:
        """State that the dispatcher may not know until it has answered the goodbye, in words.

        None if nothing is worth another connection.
        """


@dataclass(frozen=True, slots=True)
class Role:
    """A core with the parameters of its connections.

    side: of the protocol. limits: of the frames that the dispatcher sends to this role. changed:
    called after messages were handled. guard: held while the core is used and `changed` is called.
    memory: allocates memory for received payloads. name: for the log.
    """

    core: ClientCore
    side: Side
    limits: FrameLimits
    changed: Callable[[], None]
    guard: AbstractContextManager[object] = field(default_factory=nullcontext)
    memory: Memory = uninitialised
    name: str = "a producer"


#: Heartbeats for which a Ping may stay unanswered, so the peer may be silent for three: a pause of
#: the dispatcher may delay one answer, hardly two in a row.
UNANSWERED_INTERVALS = 2
#: Seconds for the answer to HELLO, which takes a running dispatcher milliseconds.
HANDSHAKE_TIMEOUT_S = 10.0
#: Seconds for a connection attempt, before the next address or attempt.
CONNECT_TIMEOUT_S = 5.0
#: Seconds for which a close waits for the dispatcher's confirmation.
CLOSE_TIMEOUT_S = 5.0
#: Seconds between attempts. A restarted dispatcher is back within seconds; longer delays would add
#: to the pause.
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0
#: Seconds between two log lines while there is no connection, however many attempts fail.
LOG_INTERVAL_S = 30.0
#: Seconds after which a connection counts as stable: delays after its loss start short again.
STABLE_S = 10.0
#: Attempts that still count after a welcome: a client that loses each connection at once waits up
#: to 0.8 s; only for an unreachable dispatcher do the delays grow longer.
ATTEMPTS_AFTER_WELCOME = 3


class Heartbeat:
    """Decides when the next Ping is due, and whether one has gone unanswered for too long.

    The limit counts from an unanswered Ping, not from the last message: a process that was itself
    stopped or starved for longer reads the answer before it checks.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        # A misconfigured peer may ask for more than a hundred pings a second.
        self._interval = max(interval_s, 0.01)
        self._pinged = now
        self._unanswered_since: float | None = None

    def received(self) -> None:
        """The peer has sent bytes."""
        self._unanswered_since = None

    def wait(self, now: float) -> float:
        """Seconds until something is due."""
        due = self._pinged + self._interval
        if self._unanswered_since is not None:
            due = min(due, self._unanswered_since + UNANSWERED_INTERVALS * self._interval)
        return max(due - now, 0.0)

    def ping_due(self, now: float) -> bool:
        """Whether to send a Ping now; if so, it counts as sent."""
        if now < self._pinged + self._interval:
            return False
        self._pinged = now
        if self._unanswered_since is None:
            self._unanswered_since = now
        return True

    def check(self, now: float) -> None:
        """Raise ConnectionError when the peer has been silent for too long.

        Call it after reading all received bytes.
        """
        since = self._unanswered_since
        if since is not None and now - since >= UNANSWERED_INTERVALS * self._interval:
            raise ConnectionError(f"a ping was not answered for {now - since:.1f} s")


class Backoff:
    """Delays between attempts to connect: exponential, with jitter, until `timeout` has passed.

    The timeout runs from the loss of a connection, or from the first attempt. Jitter keeps a
    thousand ranks from reconnecting in the same millisecond. No delay exceeds the heartbeat
    interval: a rank is lost after --rank-timeout, which exceeds two heartbeats.
    """

    def __init__(
        self,
        timeout: float,
        uniform: Callable[[], float] = random.random,
        *,
        longest: float = LONGEST_DELAY_S,
    ) -> None:
        self.timeout = timeout
        self._uniform, self._longest, self._interval = uniform, longest, longest
        self._attempt = 0
        self._failing_since: float | None = None
        self._connected_at: float | None = None

    def begins(self, now: float) -> None:
        """An attempt begins; it counts as failing until it succeeds."""
        if self._failing_since is None:
            self._failing_since = now

    def left(self, now: float) -> float:
        """Seconds until the timeout."""
        since = now if self._failing_since is None else self._failing_since
        return max(0.0, since + self.timeout - now)

    def connected(self, now: float, heartbeat_interval_s: float = LONGEST_DELAY_S) -> None:
        """A connection was established; it has heartbeats every `heartbeat_interval_s` seconds."""
        self._connected_at, self._failing_since = now, None
        self._interval = max(heartbeat_interval_s, FIRST_DELAY_S)
        self._attempt = min(self._attempt, ATTEMPTS_AFTER_WELCOME)

    def failed(self, now: float) -> float | None:
        """An attempt failed; returns the seconds to wait, or None after the timeout."""
        if self._connected_at is not None and now - self._connected_at >= STABLE_S:
            self._attempt = 0
        self._connected_at = None
        self.begins(now)
        left = self.left(now)
        if not left:
            return None
        ceiling = min(FIRST_DELAY_S * 2.0**self._attempt, self._longest, self._interval)
        self._attempt = min(self._attempt + 1, 16)
        return min(ceiling * (0.5 + self._uniform() / 2), left)
