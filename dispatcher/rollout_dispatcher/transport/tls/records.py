"""asyncio's TLS over one connection, without the memory that it would have for each by itself.

What arrives encrypted is received into a buffer, and copied from there before anything else
happens, so one buffer serves all the connections of an event loop. asyncio has 256 KiB for each,
from its first byte on: far more than all else that a handshake takes.
"""

import asyncio
import ssl
from asyncio import sslproto
from collections.abc import Callable

#: As much as asyncio receives at a time.
BUFFER_BYTES = 256 * 1024


class TlsRecords(sslproto.SSLProtocol):
    """Leads a server's handshake, then carries records for `protocol`.

    answered: called once, when what came first was answered. done: set once the handshake is.
    buffer: of `BUFFER_BYTES`, shared with others on this loop.
    """

    max_size = 1  # for the buffer of its own, which is let go again

    def __init__(
        self,
        protocol: asyncio.BaseProtocol,
        context: ssl.SSLContext,
        done: "asyncio.Future[None]",
        *,
        answered: Callable[[], None],
        buffer: bytearray,
        handshake_timeout: float,
        shutdown_timeout: float,
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            protocol,
            context,
            done,
            server_side=True,
            ssl_handshake_timeout=handshake_timeout,  # type: ignore[arg-type]  # seconds, any
            ssl_shutdown_timeout=shutdown_timeout,
        )
        self.max_size = BUFFER_BYTES  # type: ignore[misc]  # of what is read at a time
        self._ssl_buffer, self._ssl_buffer_view = buffer, memoryview(buffer)
        self._answered: Callable[[], None] | None = answered

    def buffer_updated(self, nbytes: int) -> None:
        """Take what arrived, which is answered at once."""
        super().buffer_updated(nbytes)
        if self._answered is not None:
            answered, self._answered = self._answered, None
            answered()
