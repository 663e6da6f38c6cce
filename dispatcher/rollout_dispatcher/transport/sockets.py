"""Listen and connect over TCP, TLS, or a Unix socket that is private to its user.

Invariant: a file at a Unix socket's path is removed only if this process bound it, or no process
listens on it.
"""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.listener import BACKLOG, ConnectionHandler, Listener
from rollout_dispatcher.transport.plain import StreamProtocol, StreamTransport
from rollout_dispatcher.transport.tls import TlsListener


@contextlib.asynccontextmanager
async def listen(endpoint: Endpoint, handler: ConnectionHandler) -> AsyncIterator[Listener]:
    """Listen within a context, over TLS if the handler has it. Raises OSError."""
    tls = handler.tls
    with listening_socket(endpoint) as sock:
        at = replace(_bound(endpoint, sock), tls=tls is not None)
        listener = TlsListener(sock, at, handler, tls) if tls else Listener(sock, at, handler)
        try:
            yield listener
        finally:
            listener.close()
            await listener.wait_closed()


async def connect(
    endpoint: Endpoint, protocol: StreamProtocol, tls: ssl.SSLContext | None = None
) -> None:
    """Connect `protocol` to the first of the endpoint's addresses that answers.

    tls: context of a `tls://` endpoint, which uses asyncio's own transport. Raises OSError; put a
    deadline around it.
    """
    loop = asyncio.get_running_loop()
    if endpoint.tls:
        assert tls is not None, "a tls:// endpoint needs a context"
        await loop.create_connection(lambda: protocol, endpoint.host, endpoint.port, ssl=tls)
    else:
        StreamTransport(loop, await _connected(loop, endpoint), protocol)


@contextlib.contextmanager
def listening_socket(endpoint: Endpoint) -> Iterator[socket.socket]:
    """A bound, listening socket; a Unix socket is private to this user, its path removed later."""
    if not endpoint.path:
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        sock = socket.create_server((endpoint.host, endpoint.port), family=family, backlog=BACKLOG)
        with _closing(sock):
            # Accepted sockets inherit it, so small frames are sent at once.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield sock
        return
    path = Path(endpoint.path)
    _remove_stale(path)
    with _closing(socket.socket(socket.AF_UNIX)) as sock:
        _bind(sock, path)
        sock.listen(BACKLOG)
        ours = _identity(path)
        try:
            yield sock
        finally:
            _remove(path, ours)


def _bind(sock: socket.socket, path: Path) -> None:
    """Make the socket's file. Raises OSError with the path, which the system's own lacks."""
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        code = error.errno or errno.ENAMETOOLONG  # Python raises that one without a number
        raise OSError(code, error.strerror or str(error), str(path)) from error
    finally:
        os.umask(before)


@contextlib.contextmanager
def _closing(sock: socket.socket) -> Iterator[socket.socket]:
    """Close a socket, even if it was closed elsewhere, which its reader reports."""
    try:
        yield sock
    finally:
        with contextlib.suppress(OSError):
            sock.close()


def _remove_stale(path: Path) -> None:
    """Remove a socket left by a killed process. Raises OSError if a process listens on it."""
    if not path.is_socket():
        return
    found = _identity(path)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            _remove(path, found)
            return
        except (BlockingIOError, TimeoutError):
            pass  # a process listens, with a full backlog
    raise OSError(errno.EADDRINUSE, "another process listens there", str(path))


def _identity(path: Path) -> tuple[int, int] | None:
    """The identity of the file at a path, without following links."""
    try:
        at = path.lstat()
    except OSError:
        return None
    return at.st_dev, at.st_ino


def _remove(path: Path, known: tuple[int, int] | None) -> None:
    """Remove the file if it is still the known one: another is a successor's."""
    if known is not None and _identity(path) == known:
        path.unlink(missing_ok=True)


def _bound(asked: Endpoint, sock: socket.socket) -> Endpoint:
    """The address of a listening socket, with its port, as clients write it."""
    if asked.path:
        return asked
    host, port = sock.getsockname()[:2]
    return replace(asked, host=host, port=port)


async def _connected(loop: asyncio.AbstractEventLoop, endpoint: Endpoint) -> socket.socket:
    if endpoint.path:
        return _connected_unix(endpoint.path)
    found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    for family, _, _, _, address in found:
        try:
            sock = await _try(loop, family, address)
        except OSError as error:
            failure = error
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise failure or OSError(f"{endpoint} has no address")


def _connected_unix(path: str) -> socket.socket:
    """Connect at once or fail: asyncio mistakes a full backlog for a connection."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except BlockingIOError:
        sock.close()
        raise ConnectionError(f"as many connections wait for {path} already as may") from None
    except BaseException:
        sock.close()
        raise
    return sock


async def _try(
    loop: asyncio.AbstractEventLoop, family: int, address: tuple[object, ...]
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
