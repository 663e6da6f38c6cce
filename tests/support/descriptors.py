"""File descriptors of this process: which are open, and some to pass on."""

import os
import resource
import socket
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from rollout_dispatcher.transport.descriptors.closing import close_at_once
from rollout_dispatcher.transport.descriptors.sockets import (
    let_descriptors_come,
    may_bring_descriptors,
)

PATIENCE_S = 10.0
_OPEN = Path("/proc/self/fd")


def open_descriptors() -> set[str]:
    """Those that are open, without the one that it takes to look."""
    return {entry.name for entry in _OPEN.iterdir() if os.path.lexists(entry)}


def number_open_on(file: os.stat_result) -> int:
    """How many are open on this file: of our own making, whatever others leave and close."""
    found = 0
    for name in open_descriptors():
        with suppress(OSError):
            found += os.path.samestat(os.fstat(int(name)), file)
    return found


def are_closed_again(before: set[str]) -> bool:
    """Whether soon none is open but those: what others have sent is closed in other threads."""
    deadline = monotonic() + PATIENCE_S
    while not open_descriptors() <= before:
        if monotonic() > deadline:
            return False
        sleep(0.005)
    return True


@contextmanager
def a_descriptor() -> Iterator[int]:
    """Some open file."""
    descriptor = os.memfd_create("test")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """As in a process that has as many files open as it may; what is closed may be opened again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def kernel_refuses_descriptors() -> bool:
    """Whether it can, of who listens: Linux can from 6.16 on."""
    with socket.socket(socket.AF_UNIX) as sock:
        let_descriptors_come(sock, may=False)
        return not may_bring_descriptors(sock)


def send_away(sock: socket.socket, descriptor: int, data: bytes = b"x") -> bool:
    """Send it with these bytes, and have it no more; or neither, if the kernel refuses it."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
    try:
        sock.sendmsg([data], [rights])
    except PermissionError:
        close_at_once(descriptor)
        return False
    os.close(descriptor)
    return True


@contextmanager
def a_lingering_socket(seconds: int) -> Iterator[int]:
    """A TCP socket whose last close takes so long, as nobody reads what it has sent.

    The descriptor is the caller's, who passes it on and closes it within the context.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            sock.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sock.send(bytes(65536))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", True, seconds))
            yield sock.detach()


@contextmanager
def an_endless_close(seconds: int) -> Iterator[int]:
    """A Unix socket in which a lingering one waits unread: to tell it apart does not help."""
    with a_lingering_socket(seconds) as slow:
        ours, theirs = socket.socketpair()
        with theirs:
            assert send_away(theirs, slow)
        yield ours.detach()
