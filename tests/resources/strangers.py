"""A crowd of connections that never say who they are, and come again as soon as they are ended."""

import resource
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from rollout_dispatcher.protocol.endpoint import Endpoint

#: What this process needs beside the crowd.
SPARE_DESCRIPTORS = 256


class Strangers:
    """`number` of them at a time; came: connections that they have made; heard: answers to them."""

    def __init__(self, at: str, number: int, word: bytes) -> None:
        endpoint = Endpoint.parse(at)
        self._address, self._word = (endpoint.host, endpoint.port), word
        self._selector = selectors.DefaultSelector()
        self._left = False
        self.came = self.heard = 0
        for _ in range(number):
            self._come()
        self._thread = threading.Thread(target=self._come_again)
        self._thread.start()

    def leave(self) -> None:
        """All of them are gone."""
        self._left = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._gone(key.fileobj)
        self._selector.close()

    def _come(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect(self._address)
        self.came += 1
        self._selector.register(
            sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._word else 0)
        )

    def _come_again(self) -> None:
        while not self._left:
            for key, events in self._selector.select(0.1):
                if events & selectors.EVENT_READ and self._is_ended(key.fileobj):
                    self._gone(key.fileobj)
                    self._come()
                elif events & selectors.EVENT_WRITE:
                    with suppress(OSError):
                        key.fileobj.send(self._word)  # type: ignore[union-attr]
                    self._selector.modify(key.fileobj, selectors.EVENT_READ)

    def _is_ended(self, sock: object) -> bool:
        assert isinstance(sock, socket.socket)
        try:
            answer = sock.recv(65536)
            self.heard += bool(answer)
            return not answer
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _gone(self, sock: object) -> None:
        assert isinstance(sock, socket.socket)
        self._selector.unregister(sock)
        sock.close()


@contextmanager
def strangers(at: str, number: int, word: bytes = b"") -> Iterator[Strangers]:
    """So many of them at this address while the context lasts; word: what each of them says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * number + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this machine allows {hard} open files, and the crowd needs {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    crowd = Strangers(at, number, word)
    try:
        yield crowd
    finally:
        crowd.leave()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
