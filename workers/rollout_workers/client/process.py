"""A client belongs to the process that made it, and may have a thread of its own there.

A client does not survive a fork: a child would wait for a thread that it does not have, or write
into its parent's stream.

A blocking client runs its event loop in a thread of its own. The thread is a daemon, because an
exiting interpreter joins all other threads before any exit hook: an unclosed client would hang
there. Its owner says goodbye in an exit hook.
"""

import asyncio
import os
import re
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from secrets import token_hex
from typing import Any, Final, NoReturn, Self, TypeVar

from pydantic import ValidationError

from rollout_dispatcher.errors import ConfigError


class Closing(ABC):
    """A context manager that closes at its end, and abandons after an exception."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent, bounded in time."""

    def __enter__(self) -> Self:
        return self

    def abandon(self) -> None:
        """Close it as the program has failed; default: as else."""
        self.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, SystemExit):
            self.close()
        else:
            self.abandon()


def dies_of_exception() -> bool:
    """Whether this interpreter exits because of an unhandled exception.

    An interactive one keeps the last exception too, and goes on.
    """
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")


#: Characters of the host's name in a client's id.
HOST_CHARACTERS = 16


def new_client_id() -> str:
    """A unique name that locates the client: host, process, random."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().split(".")[0])[:HOST_CHARACTERS]
    return f"{host}-{os.getpid()}-{token_hex(6)}"


T = TypeVar("T")


def validated(action: Callable[[], T]) -> T:
    """Build a message from a caller's arguments; raises ConfigError, which names a bad one."""
    try:
        return action()
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise ConfigError(f"{place} is {fault['input']!r}: {fault['msg']}") from error


#: By kind of client; each names the usual way in which its users start processes.
REMEDIES: Final = {
    "producer": "make one in each process that pushes, once it has been started",
    "stream": (
        "make it in the process that uses it; for a torch DataLoader that means num_workers=0 (the "
        "stream receives ahead by itself: prefetch_steps)"
    ),
}


class _Here:
    """The id of this process, updated at a fork: asking the kernel each time is slower."""

    pid = os.getpid()

    @classmethod
    def forked(cls) -> None:
        """This is a forked child."""
        cls.pid = os.getpid()


os.register_at_fork(after_in_child=_Here.forked)


class OwnProcess:
    """The process in which a client was made. what: a key of `REMEDIES`."""

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, _Here.pid

    @property
    def is_here(self) -> bool:
        """Whether this is still that process."""
        return _Here.pid == self._pid

    def check(self) -> None:
        """Raise ConfigError in any other process."""
        if _Here.pid != self._pid:
            raise ConfigError(
                f"this {self._what} was made in process {self._pid}, from which this one "
                f"({_Here.pid}) was forked; its connection is served there: "
                f"{REMEDIES[self._what]}"
            )


def forbid_pickle(what: str) -> NoReturn:
    """Raise ConfigError for a client that is being pickled or copied."""
    raise ConfigError(f"a {what} cannot be copied or sent to another process; {REMEDIES[what]}")


class LoopThread:
    """An event loop in a thread; it ends with its last work, or once stopped."""

    def __init__(self, name: str) -> None:
        self.loop = _Loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there. Raises RuntimeError when the loop has ended."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, action: Callable[[], object]) -> None:
        """Call something there soon; no effect once the loop has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(action)

    def finish(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a last coroutine there, with which the loop ends."""

        async def last() -> None:
            try:
                await work
            finally:
                self.loop.stop()

        self.submit(last())

    def join(self, timeout: float) -> None:
        """Wait for the end of the loop, for at most `timeout` seconds.

        In the loop's own thread, return at once: a finalizer calls it there, as any thread may
        collect garbage.
        """
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        """Serve until stopped, then cancel all remaining tasks."""
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
    """Resolves names in this thread if no other can be started.

    An exiting interpreter starts no threads, but a client may have a last message to send.
    """

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> Any:
        """As `socket.getaddrinfo`; numeric addresses need no thread."""
        with suppress(socket.gaierror):
            numeric = how | {"flags": how.get("flags", 0) | socket.AI_NUMERICHOST}
            return socket.getaddrinfo(host, port, **numeric)
        try:
            return await super().getaddrinfo(host, port, **how)
        except RuntimeError:
            return socket.getaddrinfo(host, port, **how)
