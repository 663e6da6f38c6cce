"""The end of the service: by itself once all is done, or by an error that is fatal.

The service stops by itself when every step is committed and every client knows. Invariant: all
connected clients are notified. For a client that left without a goodbye, and for a worker that
releases objects in payload stores, it waits within a bound.

Callbacks of the event loop, the journal and peers run through `Failure.guard`. Invariant: the first
error is logged once, as critical, and later callbacks run all the same.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.errors import DispatcherError, IllegalTransition, NotServing
from rollout_dispatcher.service.connections.connections import Connections

log = logging.getLogger(__name__)

T = TypeVar("T")
_T = TypeVarTuple("_T")

A_WORKER = "a worker to release what is left in payload stores"


class Failure:
    """The first fatal error, if there is one.

    future: fails with it; never has a result, and is cancelled by `cancel`.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def error(self) -> BaseException | None:
        """The fatal error, or None."""
        future = self.future
        return None if future.cancelled() or not future.done() else future.exception()

    def fail(self, error: BaseException) -> None:
        """Log and keep a fatal error, unless there is one."""
        if not self.future.done():
            unexpected = None if isinstance(error, DispatcherError) else error
            text = "the dispatcher has failed: %s"
            log.critical(text, error, exc_info=unexpected, extra={"event": "failed"})
            self.future.set_exception(error)

    def guard(self, what: Callable[[*_T], object], *values: *_T) -> None:
        """Call; an error is fatal, and not raised here."""
        try:
            what(*values)
        except Exception as error:
            self.fail(error)

    def guard_asking(self, what: Callable[[], T]) -> T:
        """Call for an HTTP request. Raises what it raises, which is fatal if it is a bug."""
        try:
            return what()
        except Exception as error:
            if isinstance(error, IllegalTransition) or not isinstance(error, DispatcherError):
                self.fail(error)
            raise

    def cancel(self) -> None:
        """Cancel the future."""
        self.future.cancel()


class Completion:
    """Waits for the end of a run. timeout: seconds that absent clients have to reconnect."""

    def __init__(self, core: DispatcherCore, connections: Connections, timeout: float) -> None:
        self._core, self._connections, self._timeout = core, connections, timeout
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def over(self, failure: asyncio.Future[None]) -> None:
        """Return when every step is committed and all clients have left. Raises `failure`'s error.

        A client that left without a goodbye has `timeout` to reconnect for the end: a DP rank, or a
        producer that ended the stream and was not answered.
        """
        failure.add_done_callback(lambda _: self._over.set())
        await self._over.wait()
        if failure.cancelled():
            raise NotServing("the dispatcher was stopped before the stream had ended")
        if failure.done():
            failure.result()

    def check(self) -> None:
        """End the run if nothing is awaited any more; called after every event."""
        if not self._core.drained:  # not yet, or no more: ranks may go back to a checkpoint
            self.close()
        elif self._connections.ranks:
            return
        elif not (awaited := self._awaited):
            self._over.set()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout, self._give_up)
            text = "waiting %g s at most (--set drain-timeout) for %s"
            log.info(text, self._timeout, awaited, extra={"event": "clients-awaited"})

    @property
    def _awaited(self) -> str:
        """What the end waits for, or nothing."""
        core = self._core
        if not core.deserted:
            return "DP ranks that left without a goodbye to reconnect and receive the stream's end"
        # A producer's last answer says whether the run is finished.
        if not (core.finished or self._connections.end_is_known):
            return "producers that ended the stream to reconnect and receive the answer"
        return A_WORKER if core.pending_store_work else ""

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._connections.ranks:
            return
        if self._awaited == A_WORKER:
            log.warning(
                "%d objects or more are left in payload stores, and nobody is there to release "
                "them: the journal remembers that for the next start on it",
                self._core.pending_store_work,
                extra={"event": "objects-left"},
            )
        else:
            log.warning(
                "a client left without a goodbye and did not come back",
                extra={"event": "client-lost"},
            )
        self._over.set()
