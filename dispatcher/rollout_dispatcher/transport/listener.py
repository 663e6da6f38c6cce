"""What listeners on sockets have in common: they accept, and keep the tasks that they start.

While the plane has all the pending connections that it may have, and for want of file descriptors
or memory, nothing is accepted: who comes waits with the kernel. A socket that does not listen any
more, whoever closed it, is found out within `CHECK_SECONDS`, though no event may ever tell of it.
"""

import asyncio
import errno
import logging
import math
import socket
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from functools import partial

from rollout_dispatcher.errors import ListenerFailed
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.interface import ConnectionHandler, Listener
from rollout_dispatcher.transport.pending import MADE_ROOM, Place

log = logging.getLogger(__name__)

#: Connections to accept in one turn of the event loop.
ACCEPT_AT_ONCE = 64
#: When accepting fails, mostly for want of file descriptors, some may be free after this long.
ACCEPT_RETRY_SECONDS = 1.0
#: How often to say that accepting fails, with how often it has.
SAY_SECONDS = 60.0
#: How often to look whether the socket still listens.
CHECK_SECONDS = 1.0
#: What accept(2) fails with for a socket that will never accept again.
_NOT_LISTENING = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})


class SocketListener(Listener):
    """Accepts on a bound socket, which stays the caller's."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint, handler: ConnectionHandler) -> None:
        sock.setblocking(False)
        self.endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._sock, self._handler = sock, handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self._failures, self._said_at = 0, -math.inf
        self._loop.add_reader(sock, self._accept)
        self._check = self._loop.call_later(CHECK_SECONDS, self._check_listening)

    @abstractmethod
    def _adopt(self, sock: socket.socket) -> None:
        """Take over an accepted socket, which does not block."""

    @property
    def num_pending(self) -> int:
        """Those that a task still has to do with."""
        return len(self._tasks)

    def close(self) -> None:
        """Accept no more; tasks are cancelled."""
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._check.cancel()
        self._handler.pending.forget(self._accept_again)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Return once every task is over."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, work: Callable[[Place], Coroutine[None, None, None]]) -> None:
        """Have a task do what an accepted connection still needs; it is pending until then."""

        def end() -> None:
            if task.cancel():
                self._handler.refused(MADE_ROOM)

        place = self._handler.pending.enter(end)
        task = self._loop.create_task(work(place))
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, place))

    def _done(self, place: Place, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        place.leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(error)

    def _accept(self) -> None:
        pending = self._handler.pending
        if pending.is_full():
            self._loop.remove_reader(self._sock)
            pending.when_free(self._accept_again)
            return
        for _ in range(ACCEPT_AT_ONCE):
            if pending.is_full():
                return  # whether somebody else waits is told by the next event
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            try:
                sock.setblocking(False)
                self._adopt(sock)
            except OSError as error:
                sock.close()
                self._ended_at_once(error)
            except Exception as error:  # a bug of ours
                sock.close()
                self._die(error)
                return

    def _ended_at_once(self, error: OSError) -> None:
        ended = "a connection to %s ended at once: %s"
        log.info(ended, self.endpoint, error, extra={"kind": "ended-at-once"})

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno in _NOT_LISTENING:
            self._die(error)
            return
        self._failures += 1
        if (now := self._loop.time()) >= self._said_at + SAY_SECONDS:
            self._said_at = now
            log.error(
                "connections to %s could not be accepted (%d times so far): %s; they wait, and "
                "accepting is tried again every %g s",
                self.endpoint, self._failures, error, ACCEPT_RETRY_SECONDS,
            )  # fmt: skip
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(ACCEPT_RETRY_SECONDS, self._accept_again)

    def _accept_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def _check_listening(self) -> None:
        """A descriptor that was closed behind our back wakes nobody: it has to be asked."""
        try:
            listens = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            self._die(error)
            return
        if not listens:
            self._die(OSError(errno.EINVAL, "the socket does not listen any more"))
            return
        self._check = self._loop.call_later(CHECK_SECONDS, self._check_listening)

    def _die(self, error: BaseException) -> None:
        if self._closed:
            return
        self.close()
        failed = ListenerFailed(self.endpoint, error)
        failed.__cause__ = error
        self._handler.died(failed)
