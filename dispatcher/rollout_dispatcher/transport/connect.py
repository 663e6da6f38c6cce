"""Connects a client's protocol to an endpoint, over the transport of its scheme."""

import ssl

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.plain import StreamProtocol
from rollout_dispatcher.transport.schemes import TRANSPORTS


async def connect(
    endpoint: Endpoint, protocol: StreamProtocol, tls: ssl.SSLContext | None = None
) -> None:
    """Connect `protocol` to `endpoint`.

    tls: how to lead the handshake of a `tls://` endpoint. Raises OSError; put a deadline around it.
    """
    await TRANSPORTS[endpoint.scheme].connect(endpoint, protocol, tls)
