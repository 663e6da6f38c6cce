"""What a connection asks of a role's core; of a producer's and of a DP rank's alike.

A core decides and remembers over all connections of its client. It has no socket, clock or thread:
time is an argument, and whoever shares it between threads guards it.
"""

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

    def heard(self, message: m.Message, payload: memoryview, now: float) -> None:
        """Take a message, the welcome first of all.

        Raises ProtocolError for one out of turn, or ConnectionError or another DispatcherError
        that it stands for.
        """

    def take_messages(self, now: float) -> Iterable[Outgoing]:
        """What to send now, in order; each is taken as sent once it is asked for."""

    def take_answers(self) -> Iterable[Outgoing]:
        """What of that answers a request, and may be said after the goodbye too."""

    def ping(self) -> m.Ping:
        """A Ping to send at once."""

    def wait(self, now: float) -> float | None:
        """Seconds until there may be something to send that waits for time; else None."""

    def lost(self) -> None:
        """The connection is over: nothing said from here on is heard; the next hello will tell."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do, but for the dispatcher to have heard of it."""

    @property
    def unconfirmed(self) -> str | None:
        """What the dispatcher may not know of as long as it has not answered the goodbye.

        None if nothing is worth another connection.
        """


@dataclass(frozen=True, slots=True)
class Role:
    """A core, and how connections treat it.

    side: which of the protocol's it is. limits: of the frames that the dispatcher sends to this
    role. changed: called when the core has heard something. guard: held wherever the core is used,
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
