"""Signals of the process.

    SIGTERM, SIGINT   the first and the second are reported; after the second the process has
                      `QUIT_SECONDS` to end in order, and then exits; a third ends it at once
    others            are reported each time, and end nothing

Handlers are `signal.signal`'s and not the event loop's, which may hang: in a write to a log that
nobody reads, for one. Invariant: the process is gone `QUIT_SECONDS` after the second signal, unless
the kernel itself blocks.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

T = TypeVar("T")

ENDING = (signal.SIGTERM, signal.SIGINT)
#: Seconds; connections and HTTP requests that hang have two of them.
QUIT_SECONDS = 5
#: Exit code of a process that could not end in order.
FAILURE = 1


class Signals:
    """Handles signals until the process ends; made on the main thread's event loop.

    others: by signal that ends nothing, what to call on the event loop. A signal that has a handler
    already, or is ignored, as under `nohup`, stays so.
    """

    def __init__(self, others: Mapping[signal.Signals, Callable[[], None]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._times_asked = 0
        for number in ENDING:
            signal.signal(number, self._end)
        self._others = {
            number: call
            for number, call in others.items()
            if signal.getsignal(number) is signal.SIG_DFL
        }
        for number in self._others:
            signal.signal(number, lambda it, _: self._call(self._others[signal.Signals(it)]))

    @staticmethod
    def ignore() -> None:
        """Ignore signals at the end, so that none changes the exit code."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    async def unless_signalled(self, work: Coroutine[None, None, T]) -> T | signal.Signals:
        """Return the result of the work, or the signal that came first and cancelled it."""
        working, asked = asyncio.create_task(work), asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return asked.result()
            if asked.done():  # at the same moment: the next call returns it
                self._asked.put_nowait(asked.result())
            return working.result()
        finally:
            working.cancel()
            asked.cancel()
            await asyncio.wait({working, asked})

    def _end(self, number: int, _: object) -> None:
        self._times_asked += 1
        if self._times_asked > 2:
            _exit()
        if self._times_asked == 2:
            signal.signal(signal.SIGALRM, _exit)
            signal.alarm(QUIT_SECONDS)
        self._call(self._asked.put_nowait, signal.Signals(number))

    def _call(self, what: Callable[..., object], *values: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the end is near
            self._loop.call_soon_threadsafe(what, *values)


def _exit(*_: object) -> None:
    """End without waiting for other threads, which may hold any lock."""
    os._exit(FAILURE)
