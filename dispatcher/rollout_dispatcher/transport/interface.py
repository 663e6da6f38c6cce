"""What every transport offers: listeners to a service, connections to its clients.

A transport is the way of one scheme of address. A new one is a module with a `Transport`, its line
in `schemes.py`, and its notation in `protocol/endpoint.py`. Invariant: a listener that accepts no
more has been closed, or has told its handler so.
"""

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from rollout_dispatcher.errors import ListenerFailed
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.pending import Pending
from rollout_dispatcher.transport.plain import StreamProtocol


@dataclass(frozen=True, slots=True)
class ServerTls:
    """How to serve TLS.

    context: of the next connection, as certificates are renewed. secured: called with a stream
    protocol whose session is there, and the certificate that its client has shown, if any.
    to_plain: what a client reads that does not speak TLS.
    """

    context: Callable[[], ssl.SSLContext]
    secured: Callable[[StreamProtocol, object], None]
    to_plain: bytes


@dataclass(frozen=True, slots=True)
class ConnectionHandler:
    """What a plane does about the connections of its listeners.

    protocol: makes the protocol of one that is accepted; a `StreamProtocol` is driven by our own
    transports, any other by asyncio's. From when it is connected it has its place in `pending`
    itself; before that the listener has one for it. refused: counts one that never came to have a
    protocol, by reason. died: is told once that nobody can connect any more. handshake_timeout:
    seconds, for what has to happen before there is a protocol.
    """

    protocol: Callable[[], asyncio.BaseProtocol]
    pending: Pending
    refused: Callable[[str], None]
    died: Callable[[ListenerFailed], None]
    handshake_timeout: float
    tls: ServerTls | None = None


class Listener(ABC):
    """Accepts connections from its making until it is closed or dies; endpoint: where."""

    endpoint: Endpoint

    @property
    @abstractmethod
    def num_pending(self) -> int:
        """Connections that have no protocol yet."""

    @abstractmethod
    def close(self) -> None:
        """Accept no more, and end what is pending; connections with a protocol live on."""

    @abstractmethod
    async def wait_closed(self) -> None:
        """Return once nothing is pending any more."""


class Transport(ABC):
    """One way for connections to travel."""

    @abstractmethod
    def listen(
        self, endpoint: Endpoint, handler: ConnectionHandler
    ) -> AbstractAsyncContextManager[Listener]:
        """Listen within a context. Raises OSError where that cannot be done."""

    @abstractmethod
    async def connect(
        self, endpoint: Endpoint, protocol: StreamProtocol, tls: ssl.SSLContext | None
    ) -> None:
        """Connect `protocol`; see `connect.connect`."""
