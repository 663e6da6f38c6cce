"""Accepts connections on a bound stream socket and makes a protocol's transport of each."""

import asyncio
import logging
import socket
from collections.abc import Callable

from rollout_dispatcher.transport.plain import StreamProtocol, StreamTransport

log = logging.getLogger(__name__)

#: Connections to accept in one turn of the event loop.
ACCEPT_AT_ONCE = 64
#: When accepting fails, mostly for want of file descriptors, some may be free after this long.
ACCEPT_RETRY_SECONDS = 1.0


class Listener:
    """Accepts until closed; `protocol` makes the protocol of one connection."""

    def __init__(self, sock: socket.socket, protocol: Callable[[], StreamProtocol]) -> None:
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._sock, self._protocol = sock, protocol
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accept no more; the socket stays open, it is the caller's."""
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("a connection could not be accepted: %s", error)
                self._loop.remove_reader(self._sock)
                self._retry = self._loop.call_later(ACCEPT_RETRY_SECONDS, self._listen)
                return
            StreamTransport(self._loop, sock, self._protocol())
