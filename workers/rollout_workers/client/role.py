"""What a connection asks of a role's core; of a producer's and of a DP rank's alike.

A core decides and remembers over all connections of its client. It has no socket, clock or thread:
time is an argument, and whoever shares it between threads guards it.

`Heartbeat` says when to ping and when to give a connection up, `Backoff` how long to wait before
the next.
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

    token: the secret that `hello` shows, set before every connection.
    """

    token: str | None

    def hello(self) -> m.Message:
        """The first message of a connection: everything that a lost one may have swallowed."""

    def receive(self, message: m.Message, payload: memoryview, now: float) -> None:
        """Take a message, the welcome first of all.

        Raises ProtocolError for one out of turn, or ConnectionError or another DispatcherError
        that it stands for.
        """

    def take_messages(self, now: float) -> Iterable[Outgoing]:
        """What to send now, in order; each is taken as sent once it is asked for."""

    def take_answers(self) -> Iterable[Outgoing]:
        """Those messages that answer a request, which may be sent after the goodbye too."""

    def ping(self) -> m.Ping:
        """A Ping to send at once."""

    def wait(self, now: float) -> float | None:
        """Seconds until there may be something to send that waits for time; else None."""

    def lost(self) -> None:
        """The connection is lost: the next hello reports the state."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do but to let the dispatcher know."""

    @property
    def unconfirmed(self) -> str | None:
        """What the dispatcher may not know of as long as it has not answered the goodbye.

        None if nothing is worth another connection.
        """


@dataclass(frozen=True, slots=True)
class Role:
    """A core, and how connections treat it.

    side: which of the protocol's it is. limits: of the frames that the dispatcher sends to this
    role. changed: called after messages were handled. guard: held wherever the core is used,
    and where `changed` is called. memory: gives what payloads are received into. name: what the
    log calls it.
    """

    core: ClientCore
    side: Side
    limits: FrameLimits
    changed: Callable[[], None]
    guard: AbstractContextManager[object] = field(default_factory=nullcontext)
    memory: Memory = uninitialised
    name: str = "a producer"


#: A Ping may stay unanswered for this many heartbeats, so the peer may be silent for three: one
#: answer may be lost to a pause of the dispatcher, two in a row hardly.
UNANSWERED_INTERVALS = 2
#: A dispatcher that is up answers HELLO in milliseconds; one that is not busy, in far less.
HANDSHAKE_TIMEOUT_S = 10.0
#: How long a connection attempt may take before the next address or attempt gets its turn.
CONNECT_TIMEOUT_S = 5.0
#: How long a close waits for the dispatcher to confirm that it read everything.
CLOSE_TIMEOUT_S = 5.0
#: A dispatcher that is restarted is back within seconds; clients that wait longer than this
#: between attempts would add to the pause.
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0
#: Seconds between two log lines while there is no connection, however many attempts fail.
LOG_INTERVAL_S = 30.0
#: A connection that held this long was a good one: the next loss starts with short delays again.
STABLE_S = 10.0
#: Attempts that count after a welcome: who is welcomed and lost at once again waits up to 0.8 s,
#: while only a dispatcher that cannot be reached at all is left alone for longer.
ATTEMPTS_AFTER_WELCOME = 3


class Heartbeat:
    """When the next Ping is due, and whether one has gone unanswered for too long.

    Counting from an unanswered Ping, not from the last message, spares a process that was itself
    stopped or starved for longer than the limit: it reads the answer before it checks.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        # A peer that asks for a hundred pings a second is misconfigured; do not obey it.
        self._interval = max(interval_s, 0.01)
        self._pinged = now
        self._unanswered_since: float | None = None

    def received(self) -> None:
        """A message of the peer has come."""
        self._unanswered_since = None

    def wait(self, now: float) -> float:
        """Seconds until something is due."""
        due = self._pinged + self._interval
        if self._unanswered_since is not None:
            due = min(due, self._unanswered_since + UNANSWERED_INTERVALS * self._interval)
        return max(due - now, 0.0)

    def ping_due(self, now: float) -> bool:
        """Whether to send a Ping now; taken as sent."""
        if now < self._pinged + self._interval:
            return False
        self._pinged = now
        if self._unanswered_since is None:
            self._unanswered_since = now
        return True

    def check(self, now: float) -> None:
        """Raise ConnectionError when the peer has been silent for too long.

        Call it after reading what there was to read.
        """
        since = self._unanswered_since
        if since is not None and now - since >= UNANSWERED_INTERVALS * self._interval:
            raise ConnectionError(f"a ping was not answered for {now - since:.1f} s")


class Backoff:
    """Delays between attempts to connect: exponential, with jitter, until `timeout` has passed.

    The timeout runs from the loss of a connection, or from the first attempt. Jitter keeps a
    thousand ranks from coming back in the same millisecond. No delay is longer than the heartbeat
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
        """Note that an attempt begins, which counts as failing until it succeeds."""
        if self._failing_since is None:
            self._failing_since = now

    def left(self, now: float) -> float:
        """Seconds until it is time to give up."""
        since = now if self._failing_since is None else self._failing_since
        return max(0.0, since + self.timeout - now)

    def connected(self, now: float, heartbeat_interval_s: float = LONGEST_DELAY_S) -> None:
        """Note that a connection was established, whose heartbeats are so many seconds apart."""
        self._connected_at, self._failing_since = now, None
        self._interval = max(heartbeat_interval_s, FIRST_DELAY_S)
        self._attempt = min(self._attempt, ATTEMPTS_AFTER_WELCOME)

    def failed(self, now: float) -> float | None:
        """Note a failure; return the seconds to wait, or None when it is time to give up."""
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
