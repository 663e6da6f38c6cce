"""An event loop in a thread of its own, for clients whose callers block.

The thread is a daemon because an exiting interpreter joins all others before it runs any exit hook:
a client that nobody closed would hang there. Whoever starts one says goodbye by an exit hook.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs from the start until `stop` is called in it, or its last work ends it."""

    def __init__(self, name: str) -> None:
        self.loop = _Loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there. Raises RuntimeError when the loop has ended."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, action: Callable[[], object]) -> None:
        """Call something there, soon; nothing happens once the loop has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(action)

    def finish(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a last coroutine there; the loop ends with it."""

        async def last() -> None:
            try:
                await work
            finally:
                self.loop.stop()

        self.submit(last())

    def join(self, timeout: float) -> None:
        """Wait for the end of the loop, so many seconds at most; in the loop itself, do not wait.

        There it is a finalizer that asks: garbage is collected in whichever thread makes more.
        """
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        """Serve until stopped, then end whatever a caller left behind."""
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()


class _Loop(asyncio.SelectorEventLoop):
    """Looks names up in other threads, as every event loop does, unless there can be none.

    An interpreter that exits starts no more threads; a client may have a last word to say then.
    """

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> Any:
        """As `socket.getaddrinfo`; addresses that are numbers need no look-up."""
        with suppress(socket.gaierror):
            numeric = how | {"flags": how.get("flags", 0) | socket.AI_NUMERICHOST}
            return socket.getaddrinfo(host, port, **numeric)
        try:
            return await super().getaddrinfo(host, port, **how)
        except RuntimeError:
            return socket.getaddrinfo(host, port, **how)
