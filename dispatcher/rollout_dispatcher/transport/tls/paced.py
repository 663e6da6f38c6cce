"""A stream over TLS, with the backpressure that a plain one has.

asyncio's TLS transport takes whatever it is given: a frame of a hundred megabytes is encrypted and
copied at once, and what its own transport still holds no longer shows in its buffer size, so that a
deadline for reading would see neither a frame that nobody reads nor the progress of one that is
read slowly. Here bytes are handed to it a piece at a time, as long as it wants more. Invariant:
bytes leave in the order in which they were written.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rollout_dispatcher.transport.plain import StreamProtocol

#: A few TLS records: small beside the kernel's buffer, large beside the cost of a call.
PIECE_BYTES = 64 * 1024


class PacedTls(asyncio.BufferedProtocol, asyncio.Transport):
    """Stands between a TLS transport and a stream protocol: each takes it for the other.

    secured: called once the protocol has this transport, with the certificate that was shown.
    """

    def __init__(self, inner: StreamProtocol, secured: Callable[[object], None]) -> None:
        asyncio.Transport.__init__(self)
        self._inner, self._secured = inner, secured
        self._tls: asyncio.Transport | None = None
        self._waiting: deque[memoryview] = deque()
        self._full = self._inner_paused = self._closing = False

    # -- as the TLS transport's protocol ------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is done."""
        assert isinstance(transport, asyncio.Transport)
        self._tls = transport
        transport.set_write_buffer_limits(high=PIECE_BYTES)
        self._inner.connection_made(self)
        self._secured(transport.get_extra_info("peercert"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over, and what waits with it."""
        self._closing = True
        self._waiting.clear()
        self._inner.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> Any:
        """Straight into the protocol's memory."""
        return self._inner.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes arrived, decrypted."""
        self._inner.buffer_updated(nbytes)

    def eof_received(self) -> bool | None:
        """Nothing more will come."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """The TLS transport holds enough."""
        self._full = True
        if not self._inner_paused:
            self._inner_paused = True
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """It wants more."""
        self._full = False
        self._forward()
        if self._inner_paused and not self._full:
            self._inner_paused = False
            self._inner.resume_writing()

    # -- as the protocol's transport --------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Send these bytes behind those that wait; they must not change until they are sent."""
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send these bytes behind those that wait."""
        if self._closing:
            return
        self._waiting.extend(memoryview(data).cast("B") for data in list_of_data if len(data))
        self._forward()

    def get_write_buffer_size(self) -> int:
        """Bytes that are not sent yet; it shrinks with every piece that the client reads."""
        held = 0 if self._tls is None else self._tls.get_write_buffer_size()
        return held + sum(map(len, self._waiting))

    def can_write_eof(self) -> bool:
        """TLS has no half-closed state."""
        return False

    def is_closing(self) -> bool:
        """Whether it is closed, or will be once everything is sent."""
        return self._closing

    def close(self) -> None:
        """Close once everything is sent."""
        self._closing = True
        if not self._waiting and self._tls is not None:
            self._tls.close()

    def abort(self) -> None:
        """Close at once."""
        self._closing = True
        self._waiting.clear()
        if self._tls is not None:
            self._tls.abort()

    def pause_reading(self) -> None:
        """Leave what arrives where it is."""
        if self._tls is not None:
            self._tls.pause_reading()

    def resume_reading(self) -> None:
        """Take it again."""
        if self._tls is not None:
            self._tls.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the TLS transport knows."""
        return default if self._tls is None else self._tls.get_extra_info(name, default)

    def _forward(self) -> None:
        """Hand over pieces as long as the TLS transport wants more."""
        assert self._tls is not None
        if self._tls.is_closing():
            self._waiting.clear()
        while self._waiting and not self._full:
            first = self._waiting.popleft()
            if len(first) > PIECE_BYTES:
                self._waiting.appendleft(first[PIECE_BYTES:])
            self._tls.write(first[:PIECE_BYTES])
        if self._closing and not self._waiting:
            self._tls.close()
