"""Addresses for servers that tests start, stop and start again at the same place."""

import random
import socket

#: Below what systems give to outgoing connections (32768 on Linux, 49152 elsewhere): one of those
#: may be taken by somebody's connection while its server is down.
_FIRST, _LAST = 20000, 32000
_TRIES = 100


def free_address() -> str:
    """Host and port of loopback where nobody listens now; see `free_port`."""
    return f"127.0.0.1:{free_port()}"


def free_port(*but: int) -> int:
    """A port of loopback that nobody has, none of these; others are unlikely to take it."""
    drawn = random.SystemRandom()
    for _ in range(_TRIES):
        port = drawn.randint(_FIRST, _LAST)
        if port in but:
            continue
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"{_TRIES} ports from {_FIRST} to {_LAST} are all in use")
