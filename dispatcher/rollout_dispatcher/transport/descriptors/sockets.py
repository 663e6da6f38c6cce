"""Unix sockets of peers who may send descriptors that nobody asked for.

Invariant: the thread that receives from such a socket, or closes it, never closes what a peer has
sent: the kernel finds room for all descriptors, unless this process may open no more files, and
what is unread is closed elsewhere.
"""

import errno
import fcntl
import socket
import termios
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from rollout_dispatcher.transport.descriptors.closing import CLOSER

#: Descriptors that the kernel takes at a time (SCM_MAX_FD).
MAX_DESCRIPTORS = 253
#: Where there is none such, nobody asks for descriptors.
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def room_for_descriptors(sock: socket.socket) -> int:
    """Bytes of ancillary data to receive with, so that the kernel closes nothing itself."""
    if sock.family != socket.AF_UNIX or not CLOSE_ON_EXEC:
        return 0
    return socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)


def descriptors_in(ancillary: Sequence[tuple[int, int, bytes]]) -> "array[int]":
    """Those that came along; they are the caller's to close."""
    came = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            came.frombytes(data[: len(data) - len(data) % came.itemsize])
    return came


def close_socket(sock: socket.socket) -> None:
    """Close it; of a Unix socket what is unread, which may be descriptors, elsewhere."""
    if not (sock.family == socket.AF_UNIX and sock.fileno() >= 0 and _ends_with_unread(sock)):
        sock.close()
        return
    CLOSER.close([sock.detach()])


def _ends_with_unread(sock: socket.socket) -> bool:
    """Have nothing more come, and tell whether there is something."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    try:
        return any(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))
    except OSError as error:  # one that listens cannot say it: connections wait in it, unread
        return error.errno != errno.EBADF


class UnixSocket(socket.socket):
    """For those who receive with `recv`, as asyncio does, and expect no descriptors."""

    @classmethod
    def of(cls, sock: socket.socket) -> Self:
        """Takes over a socket."""
        timeout = sock.gettimeout()
        made = cls(sock.family, sock.type, sock.proto, fileno=sock.detach())
        made.settimeout(timeout)
        return made

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """As that of any socket; descriptors are closed."""
        data, ancillary, _, _ = self.recvmsg(
            bufsize, room_for_descriptors(self), flags | CLOSE_ON_EXEC
        )
        if ancillary:
            CLOSER.close(descriptors_in(ancillary))
        return data

    def close(self) -> None:
        """As that of any socket; what is unread is closed elsewhere."""
        if self.fileno() >= 0 and _ends_with_unread(self):
            CLOSER.close([self.detach()])
        super().close()
