"""Unix sockets of peers who may send descriptors that nobody asked for.

From Linux 6.16 on a listener's connections bring none until that was agreed on: the kernel refuses
whoever sends one (SO_PASSRIGHTS). Before that anybody who may connect can send some.

Invariant: the thread that receives from a socket that may bring descriptors, or closes it, never
closes what a peer has sent: the kernel finds room for all of them, unless this process may open no
more files, and what is unread is closed elsewhere.
"""

import errno
import fcntl
import socket
import sys
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
#: Of Linux's <asm-generic/socket.h>, as of 6.16; Python has no name for it.
SO_PASSRIGHTS = 83


def let_descriptors_come(sock: socket.socket, *, may: bool) -> None:
    """Whether peers may send some; of a listener, also to what it has not accepted yet.

    Where the kernel cannot refuse them they may come all the same.
    """
    if sock.family == socket.AF_UNIX and sys.platform == "linux":
        with suppress(OSError):  # before 6.16
            sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, may)


def may_bring_descriptors(sock: socket.socket) -> bool:
    """Whether peers can send some, wanted or not."""
    if sock.family != socket.AF_UNIX or not CLOSE_ON_EXEC:
        return False
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS))
    except OSError:  # before 6.16, or it is closed
        return True


def room_for_descriptors(sock: socket.socket) -> int:
    """Bytes of ancillary data to receive with, so that the kernel closes nothing itself."""
    if not may_bring_descriptors(sock):
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
    if not (may_bring_descriptors(sock) and sock.fileno() >= 0 and _ends_with_unread(sock)):
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
    """For those who receive with `recv`, as asyncio does, and expect no descriptors.

    For sockets that may bring some: any other one needs nothing of this.
    """

    @classmethod
    def of(cls, sock: socket.socket) -> Self:
        """Takes over a socket."""
        timeout = sock.gettimeout()
        made = cls(sock.family, sock.type, sock.proto, fileno=sock.detach())
        made.settimeout(timeout)
        return made

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """As that of any socket; descriptors are closed.

        Raises ConnectionAbortedError while as many wait to be closed as may: asyncio, which would
        ask again and again, ends the connection.
        """
        if CLOSER.is_full:
            raise ConnectionAbortedError(
                "as many file descriptors that others have sent wait to be closed as may"
            )
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
