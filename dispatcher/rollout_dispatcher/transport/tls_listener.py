"""The door of a TLS listener: it leads connections through the handshake, and counts them from the
first byte.

asyncio's own TLS server tells nobody of a connection before its handshake is done, nor why it
failed. Here a connection that never completes one is subject to the limit on connections and to a
deadline, failures are counted, and a client that does not speak TLS is told so in its own protocol.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass

log = logging.getLogger(__name__)

#: First byte of a TLS handshake record (RFC 8446, section 5.1).
HANDSHAKE_RECORD = b"\x16"
#: For a client that is turned away to read why, and for the closing words of a TLS session.
GOODBYE_SECONDS = 2.0
#: When accepting fails, mostly for want of file descriptors, some may be free after this long.
ACCEPT_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Visitors:
    """What the plane behind a door does about connections.

    protocol: makes the protocol of one that is let in. connections: how many there are inside.
    turned_away: counts one that is not let in, by reason. to_plain: says that TLS is spoken here.
    """

    protocol: Callable[[], asyncio.BaseProtocol]
    connections: Callable[[], int]
    turned_away: Callable[[str], None]
    to_plain: bytes


class TlsListener:
    """Accepts TLS connections on a bound socket, at most `limit`, each within `timeout` seconds."""

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLContext,
        visitors: Visitors,
        *,
        limit: int,
        timeout: float,
    ) -> None:
        sock.setblocking(False)
        self._sock, self._tls, self._visitors = sock, tls, visitors
        self._limit, self._timeout = limit, timeout
        self._shaking_hands = 0

    async def serve(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    sock, _ = await loop.sock_accept(self._sock)
                except OSError as error:
                    log.error("a connection could not be accepted: %s", error)
                    await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                    continue
                if self._shaking_hands + self._visitors.connections() >= self._limit:
                    sock.close()
                    self._visitors.turned_away("connection-limit")
                    continue
                self._shaking_hands += 1
                tasks.create_task(self._receive(sock))

    async def _receive(self, sock: socket.socket) -> None:
        """Take one connection to its plane, or count why not. Raises nothing but a cancellation."""
        try:
            async with asyncio.timeout(self._timeout):
                reason = await self._shake_hands(sock)
        except TimeoutError:
            reason = "handshake-timeout"
        except OSError as error:
            log.info("a TLS handshake failed: %s", error)
            reason = "tls"
        finally:
            self._shaking_hands -= 1
        if reason is not None:
            self._visitors.turned_away(reason)

    async def _shake_hands(self, sock: socket.socket) -> str | None:
        """None once the plane has the connection, else why it has not."""
        try:
            first = await _peek(sock)
        except BaseException:
            sock.close()
            raise
        if not first:
            sock.close()
            return "eof"
        if first != HANDSHAKE_RECORD:
            await _say_and_close(sock, self._visitors.to_plain)
            return "plain"
        await asyncio.get_running_loop().connect_accepted_socket(
            self._visitors.protocol,
            sock,
            ssl=self._tls,
            ssl_handshake_timeout=self._timeout,
            ssl_shutdown_timeout=GOODBYE_SECONDS,
        )
        return None


async def _peek(sock: socket.socket) -> bytes:
    """The first byte that arrives, left where it is; nothing if the client hangs up."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _resolve, arrived)
    try:
        await arrived
    finally:
        loop.remove_reader(sock)
    return sock.recv(1, socket.MSG_PEEK)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _say_and_close(sock: socket.socket, words: bytes) -> None:
    """Write a few words and wait a little until they are read.

    Closing with bytes unread would reset the connection, and the words might be lost.
    """
    loop = asyncio.get_running_loop()
    with closing(sock), suppress(TimeoutError, OSError):
        async with asyncio.timeout(GOODBYE_SECONDS):
            await loop.sock_sendall(sock, words)
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, 65536):
                pass
