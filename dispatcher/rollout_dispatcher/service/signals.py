"""Signals of the process.

    SIGTERM, SIGINT   the first and the second are told; after the second the process has
                      `QUIT_SECONDS` to end in order, and is ended then; a third ends it at once
    others            are told as often as they come, and end nothing

Python handles them on the main thread, between two of its steps or where it waits in the kernel for
a log that nobody reads. Invariant: once asked twice, the process is gone within `QUIT_SECONDS`,
unless the kernel itself cannot let go of it.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

T = TypeVar("T")

ENDING = (signal.SIGTERM, signal.SIGINT)
#: Connections that hang have two seconds at the end, and so have requests over HTTP.
QUIT_SECONDS = 5
#: What a process exits with that could not end in order.
FAILURE = 1


class Signals:
    """Heeds signals from its making until the process ends; made on the main thread's event loop.

    others: what is done on the event loop about signals that end nothing; one that has a handler
    already, or is ignored, as under `nohup`, keeps it.
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
    def heed_no_more() -> None:
        """The process ends, with an exit code that no signal changes: the interpreter on its way
        out would let it be killed.
        """
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    async def unless_asked(self, work: Coroutine[None, None, T]) -> T | signal.Signals:
        """What comes of the work; or the signal that came before it, which cancels the work."""
        working, asked = asyncio.create_task(work), asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return asked.result()
            if asked.done():  # at the same moment: it is heeded next
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
    """End without waiting for anything: other threads may never return, and hold any lock."""
    os._exit(FAILURE)
