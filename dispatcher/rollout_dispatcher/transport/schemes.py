"""The transports, by the scheme of the address that they are for."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Final

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.interface import ConnectionHandler, Listener, Transport
from rollout_dispatcher.transport.plain_sockets import PlainSockets
from rollout_dispatcher.transport.tls.sockets import TlsSockets

TRANSPORTS: Final[Mapping[str, Transport]] = {
    "tcp": PlainSockets(),
    "unix": PlainSockets(),
    "tls": TlsSockets(),
}


def listen(endpoint: Endpoint, handler: ConnectionHandler) -> AbstractAsyncContextManager[Listener]:
    """Listen within a context, over TLS if the handler has it. Raises OSError."""
    at = replace(endpoint, tls=handler.tls is not None)
    return TRANSPORTS[at.scheme].listen(at, handler)
