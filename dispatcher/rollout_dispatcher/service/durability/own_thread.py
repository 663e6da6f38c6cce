"""What may hang for good, such as a disk: done by a thread that nobody has to wait for."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """What comes of `work`, or its error. It ends with the process, whatever it waits for.

    undo: called in a thread with what came of it if nobody waits for it any more.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if error is None and done.cancelled():
            threading.Thread(target=undo, args=(result,), daemon=True).start()
        elif error is None:
            done.set_result(result)  # type: ignore[arg-type]  # None only where that is a T
        elif not done.cancelled():
            done.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, None, error)
            return
        try:
            loop.call_soon_threadsafe(settle, result, None)
        except RuntimeError:
            undo(result)

    threading.Thread(target=run, daemon=True).start()
    return await done
