"""A proxy between one client and the dispatcher, whose connections are cut, slowed or held up.

It forwards bytes as they come and knows nothing of frames, so a cut falls anywhere in one.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import sleep

#: How much is passed on at a time while a connection is slow.
SLOW_BYTES = 512


class _Link:
    """One connection, both ways."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.budget: int | None = None
        self._lock = threading.Lock()

    def allowed(self, nbytes: int) -> int:
        """How many of these bytes may still pass."""
        with self._lock:
            if self.budget is None:
                return nbytes
            passing = min(nbytes, self.budget)
            self.budget -= passing
            return passing

    def close(self) -> None:
        for one in (self.client, self.server):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Listens on loopback for one client's connections."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.endpoint = f"{host}:{port}"
        self._links: set[_Link] = set()
        self._delay = 0.0
        self._flowing = threading.Event()
        self._flowing.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Cut everything and listen no more."""
        self._flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut(0)

    def cut(self, after: int) -> None:
        """Cut every connection after so many more bytes; 0: now."""
        for link in list(self._links):
            link.budget = after
            if after == 0:
                link.close()

    @contextmanager
    def slow(self, delay: float) -> Iterator[None]:
        """Pass on `SLOW_BYTES` every `delay` seconds in each direction."""
        self._delay = delay
        try:
            yield
        finally:
            self._delay = 0.0

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Pass on nothing, without ending any connection."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                try:
                    server = socket.create_connection(self._upstream, timeout=5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                link = _Link(client, server)
                self._links.add(link)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._pass, args=(link, source, sink), daemon=True
                    ).start()

    def _pass(self, link: _Link, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(SLOW_BYTES if self._delay else 65_536):
                self._flowing.wait()
                if self._delay:
                    sleep(self._delay)
                passing = link.allowed(len(data))
                sink.sendall(data[:passing])
                if passing < len(data):
                    break
        link.close()
        source.close()
        self._links.discard(link)
