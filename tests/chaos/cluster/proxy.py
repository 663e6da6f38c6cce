"""A proxy between one client and the dispatcher, whose connections are cut, slowed or held up.

It forwards bytes as they come, so a cut falls anywhere in a frame. Of frames it knows where they
begin and what they are, so that a message can be lost: it and all that follows it do not arrive,
and the connection ends, as no message is lost on a connection that lives.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import sleep

from rollout_dispatcher.protocol.frame import PREFIX
from rollout_dispatcher.protocol.messages import Message

#: How much is passed on at a time while a connection is slow.
SLOW_BYTES = 512


class Frames:
    """One direction of one connection, cut where frames begin."""

    def __init__(self) -> None:
        self._missing, self._prefix = 0, b""
        #: Whether a message was lost: what follows it is, too.
        self.ended = False

    def parts(self, data: bytes) -> Iterator[tuple[int | None, bytes]]:
        """Pieces to pass on: the type of the frame that begins there and its prefix, or the rest.

        A prefix is passed on when it is whole.
        """
        while data:
            if self._missing:
                rest, data = data[: self._missing], data[self._missing :]
                self._missing -= len(rest)
                yield None, rest
                continue
            taken = PREFIX.size - len(self._prefix)
            self._prefix, data = self._prefix + data[:taken], data[taken:]
            if len(self._prefix) == PREFIX.size:
                prefix, self._prefix = self._prefix, b""
                _, kind, _, header, payload = PREFIX.unpack(prefix)
                self._missing = header + payload
                yield kind, prefix


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
        self._losing, self._left = -1, 0
        self._lock = threading.Lock()
        self._letting_go = threading.Event()
        self._letting_go.set()
        #: Set when the message that was to be lost has come.
        self.lost = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Cut everything and listen no more."""
        self._flowing.set()
        self._letting_go.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut(0)

    def cut(self, after: int) -> None:
        """Cut every connection after so many more bytes; 0: now."""
        for link in list(self._links):
            link.budget = after
            if after == 0:
                link.close()

    def lose(self, kind: type[Message], times: int = 1) -> None:
        """Lose the next messages of this kind, each with its connection; 0: no more of them."""
        with self._lock:
            self.lost.clear()
            self._losing, self._left = kind.type_code, times

    @contextmanager
    def withheld(self, kind: type[Message]) -> Iterator[None]:
        """Pass on nothing from the next message of this kind on, though its connection lives."""
        self._letting_go.clear()
        self.lose(kind)
        try:
            yield
        finally:
            self.lose(kind, times=0)
            self._letting_go.set()

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
        frames = Frames()
        with suppress(OSError):
            while data := source.recv(SLOW_BYTES if self._delay else 65_536):
                self._flowing.wait()
                if self._delay:
                    sleep(self._delay)
                kept = self._until_lost(frames, data)
                passing = link.allowed(len(kept))
                sink.sendall(kept[:passing])
                if frames.ended:
                    self._letting_go.wait()
                if frames.ended or passing < len(kept):
                    break
        link.close()
        source.close()
        self._links.discard(link)

    def _until_lost(self, frames: Frames, data: bytes) -> bytes:
        """What of this arrives."""
        arriving = bytearray()
        for kind, part in frames.parts(data):
            if kind is not None and self._loses(kind):
                frames.ended = True
                break
            arriving += part
        return bytes(arriving)

    def _loses(self, kind: int) -> bool:
        with self._lock:
            if kind != self._losing or self._left == 0:
                return False
            self._left -= 1
            self.lost.set()
            return True
