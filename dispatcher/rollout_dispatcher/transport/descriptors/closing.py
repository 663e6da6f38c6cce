"""Closes what others have sent as descriptors, in threads of its own.

To close a descriptor may take as long as its sender likes: of a TCP socket with unsent bytes and
SO_LINGER, of a file whose file system asks a process, of gigabytes of memory. Whoever does it in an
event loop stands still meanwhile, and so does everybody whom the loop serves; the kernel does it
too, in the thread that receives without room for descriptors, or closes a socket that has some
unread. So here sockets are told not to linger, and everything is closed by a few threads, which are
started when there is something to close and end when there is nothing left.

Invariants: `close` never waits for a close; no more wait than `most`, if whoever receives more asks
`is_full` before (with what comes at a time on top). It may be called from finalizers, in the midst
of itself.
"""

import _thread
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

log = logging.getLogger(__name__)

#: Closed at a time: so many that take for ever keep nobody waiting.
MOST_THREADS = 4
#: Beyond this many that wait, no more are received.
MOST_WAITING = 256
#: As SO_LINGER: close at once, and let the kernel send what is unsent.
_NO_LINGER = struct.pack("ii", 0, 0)


def close_at_once(descriptor: int) -> None:
    """Close it; of a socket, without waiting for what is unsent."""
    with suppress(OSError):  # it is no socket, or of a kind that does not linger
        sock = socket.socket(fileno=descriptor)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        finally:
            sock.detach()
    with suppress(OSError):  # of what was written to it: it is closed all the same
        os.close(descriptor)


class Closer:
    """Closes descriptors elsewhere. close: closes one of them, and may take its time."""

    def __init__(
        self, close: Callable[[int], None] = close_at_once, most: int = MOST_WAITING
    ) -> None:
        self._close, self._most = close, most
        self._waiting: deque[int] = deque()
        self._threads = 0
        #: A finalizer may come in the midst of what it guards, in the same thread.
        self._lock = threading.RLock()
        #: Called once when there is room again, from one of the threads.
        self._told: deque[Callable[[], None]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether as many wait as may."""
        return len(self._waiting) >= self._most

    def when_room(self, tell: Callable[[], None]) -> None:
        """Call once there is room, from any thread, now if there is."""
        self._told.append(tell)
        if not self.is_full:
            self._tell()

    def close(self, descriptors: Iterable[int]) -> None:
        """These are nobody's any more."""
        with self._lock:
            was_full = self.is_full
            self._waiting.extend(descriptors)
            becomes_full = self.is_full and not was_full
            for _ in range(min(len(self._waiting), MOST_THREADS - self._threads)):
                self._start()
            alone = not self._threads
        if alone:
            self._work()
        if becomes_full:
            log.warning(
                "%d file descriptors that others have sent wait to be closed, as closing takes "
                "long: until some are, nothing is received from those who can send more",
                len(self._waiting),
            )

    def _start(self) -> None:
        """One thread more, if there can be one: not where the interpreter ends, for instance."""
        with suppress(RuntimeError):
            # Not `Thread.start`, which waits, and which a finalizer may have interrupted.
            _thread.start_new_thread(self._work, (True,))
            self._threads += 1

    def _work(self, counts: bool = False) -> None:
        """Close what waits. counts: this is one of the threads."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= counts
                    return
                descriptor = self._waiting.popleft()
            if not self.is_full:
                self._tell()
            self._close(descriptor)

    def _tell(self) -> None:
        while True:
            try:
                tell = self._told.popleft()
            except IndexError:
                return
            tell()

    def forked(self) -> None:
        """The threads are the parent's: what waits is closed here by some of our own.

        What the parent's have begun to close stays open here: its number may be another file's.
        """
        self._lock = threading.RLock()
        self._threads = 0
        self._told.clear()
        self.close(())


#: That of this process.
CLOSER = Closer()
os.register_at_fork(after_in_child=CLOSER.forked)
