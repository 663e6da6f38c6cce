"""What a service manager is told of the process: systemd's `sd_notify`, where it asks for it.

The address is in NOTIFY_SOCKET, and in WATCHDOG_USEC for how long it waits for a sign of life. The
event loop gives it, so a loop that hangs is noticed, and the process started again.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from time import monotonic_ns

log = logging.getLogger(__name__)

#: Signs of life in the time that the manager waits for one.
SIGNS = 3
USEC = 1e6


class ServiceManager:
    """Whoever has started this process and wants to know how it is; does nothing if nobody does.

    environ: where it says so.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        patience = environ.get("WATCHDOG_USEC", "") if for_us and self._address else ""
        self._pause = int(patience) / USEC / SIGNS if patience.isdecimal() else 0.0

    def ready(self, status: str) -> None:
        """The process serves."""
        self._tell("READY=1", f"STATUS={status}")

    def stopping(self, status: str) -> None:
        """It ends, in order."""
        self._tell("STOPPING=1", f"STATUS={status}")

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Its settings are being read again, within."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self._tell("READY=1")

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Within, the event loop gives signs of life."""
        if not self._pause:
            yield
            return
        signs = asyncio.get_running_loop().create_task(self._give_signs(), name="watchdog")
        try:
            yield
        finally:
            signs.cancel()
            await asyncio.wait([signs])

    async def _give_signs(self) -> None:
        while True:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self._pause)

    def _tell(self, *said: str) -> None:
        if not self._address:
            return
        # Whether anybody listens is no concern of the service; it never waits for a manager.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.setblocking(False)
            to.sendto("\n".join(said).encode(), self._address)


def _address(given: str) -> str:
    if given[:1] not in {"", "/", "@"}:
        log.warning("NOTIFY_SOCKET is %r, which is no Unix socket: nobody is told", given)
        return ""
    return "\0" + given[1:] if given[:1] == "@" else given
