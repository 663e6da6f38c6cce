"""A handler for tests of listeners, which writes down what it is told."""

import asyncio
from collections.abc import Callable
from time import monotonic

from rollout_dispatcher.errors import ListenerFailed
from rollout_dispatcher.transport.listener import ConnectionHandler, Pending, ServerTls


class Heard:
    """What listeners have told their handler.

    handler: what they are given. deaths: why they accept no more. refused: one reason a connection.
    """

    def __init__(
        self, protocol: Callable[[], asyncio.BaseProtocol], tls: ServerTls | None = None
    ) -> None:
        self.deaths: list[ListenerFailed] = []
        self.refused: list[str] = []
        self.died = asyncio.Event()
        self.handler = ConnectionHandler(
            protocol=protocol,
            pending=Pending(1000, monotonic),
            refused=self.refused.append,
            died=self._die,
            handshake_timeout=10.0,
            tls=tls,
        )

    def _die(self, error: ListenerFailed) -> None:
        self.deaths.append(error)
        self.died.set()
