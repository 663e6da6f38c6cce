"""A handler for tests of listeners, which writes down what it is told."""

import asyncio
from collections.abc import Callable

from rollout_dispatcher.errors import ListenerFailed
from rollout_dispatcher.transport.interface import ConnectionHandler, ServerTls


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
            num_connections=lambda: 0,
            refused=self.refused.append,
            died=self._die,
            max_connections=1000,
            handshake_timeout=10.0,
            tls=tls,
        )

    def _die(self, error: ListenerFailed) -> None:
        self.deaths.append(error)
        self.died.set()
