"""What the service cannot go on with: the first such error ends it, and nothing is lost in a loop.

Whatever the event loop, the journal or a peer calls goes through `guard`. Invariant: what fails
there is told once, loudly, and holds up nobody who comes after it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from rollout_dispatcher.errors import DispatcherError, IllegalTransition

log = logging.getLogger(__name__)

T = TypeVar("T")
_T = TypeVarTuple("_T")


class Failure:
    """The first error of ours, if there is one.

    future: fails with it; never gets a result otherwise, and is cancelled by `cancel`.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def error(self) -> BaseException | None:
        """What has broken, if anything has."""
        future = self.future
        return None if future.cancelled() or not future.done() else future.exception()

    def fail(self, error: BaseException) -> None:
        """Something of ours broke; the first such error is what the service ends with."""
        if not self.future.done():
            unexpected = None if isinstance(error, DispatcherError) else error
            log.critical("the dispatcher has failed: %s", error, exc_info=unexpected)
            self.future.set_exception(error)

    def guard(self, what: Callable[[*_T], object], *values: *_T) -> None:
        """Call where nobody above could do better than to log what goes wrong, and go on."""
        try:
            what(*values)
        except Exception as error:
            self.fail(error)

    def guard_hearing(self, what: Callable[[*_T], object], *values: *_T) -> None:
        """The same, but raise what is the fault of the peer that is heard, and is told so.

        What is performed for it is guarded for itself, so that of our own errors only those of the
        core's tables come here as one that a peer might have made.
        """
        try:
            what(*values)
        except IllegalTransition as bug:
            self.fail(bug)
        except DispatcherError:
            raise
        except Exception as error:
            self.fail(error)

    def guard_asking(self, what: Callable[[], T]) -> T:
        """The same for who asks over HTTP, and hears of our own error too."""
        try:
            return what()
        except IllegalTransition as bug:
            self.fail(bug)
            raise
        except DispatcherError:
            raise
        except Exception as error:
            self.fail(error)
            raise

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.future.cancel()
