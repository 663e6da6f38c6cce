"""A TLS socket for a loop that never blocks: it raises what a plain non-blocking socket raises.

TLS may have to read before it can write, and the other way round. Waiting to read is right for
both here: nothing but an answer that is short of room in the kernel's buffer wants to write during
a read, and the next thing that is said, a ping at the latest, takes it along.
"""

import ssl
from collections.abc import Sequence
from typing import Any


class TlsSocket(ssl.SSLSocket):
    """Made by an SSLContext whose `sslsocket_class` it is."""

    def send(self, data: Any, flags: int = 0) -> int:
        """Send some of `data`; raises BlockingIOError when nothing can be sent now."""
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wait:
            raise BlockingIOError(str(wait)) from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as end:
            raise ConnectionResetError(str(end)) from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive into `buffer`; raises BlockingIOError when nothing has arrived."""
        try:
            return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wait:
            raise BlockingIOError(str(wait)) from None

    def recvmsg_into(  # type: ignore[override]
        self, buffers: Sequence[Any]
    ) -> tuple[int, list[Any], int, None]:
        """Receive into the first of `buffers`; TLS gives a record at a time anyway."""
        return self.recv_into(buffers[0]), [], 0, None
