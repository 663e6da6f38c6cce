"""How the service ends: by itself once all is done, or by an error that it cannot go on with.

It stops by itself when everything is committed and everybody has heard so. Invariant: nobody who is
connected is left without a word; who went without a goodbye is waited for, within a bound, and so
is somebody who releases what is left in payload stores.

Whatever the event loop, the journal or a peer calls goes through `Failure.guard`. Invariant: what
fails there is told once, loudly, and holds up nobody who comes after it.
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
            text = "the dispatcher has failed: %s"
            log.critical(text, error, exc_info=unexpected, extra={"event": "failed"})
            self.future.set_exception(error)

    def guard(self, what: Callable[[*_T], object], *values: *_T) -> None:
        """Call where nobody above could do better than to log what goes wrong, and go on."""
        try:
            what(*values)
        except Exception as error:
            self.fail(error)

    def guard_asking(self, what: Callable[[], T]) -> T:
        """Call for who asks over HTTP, and hears of what is its own fault and of our error too."""
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


class Completion:
    """Waits for the end of a run; timeout: seconds that the absent have to come back."""

    def __init__(self, core: DispatcherCore, connections: Connections, timeout: float) -> None:
        self._core, self._connections, self._timeout = core, connections, timeout
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def over(self, failure: asyncio.Future[None]) -> None:
        """Return when everything is committed and everybody has left. Raises `failure`'s error.

        Who went without a goodbye has `timeout` to come back for the end: a DP rank, or a producer
        that ended the stream and would look for us until it hears that it was heard.
        """
        failure.add_done_callback(lambda _: self._over.set())
        await self._over.wait()
        if failure.cancelled():
            raise NotServing("the dispatcher was stopped before the stream had ended")
        if failure.done():
            failure.result()

    def check(self) -> None:
        """Something has happened that may have been the last thing."""
        if not self._core.drained:  # not yet, or no more: ranks may go back to a checkpoint
            if self._timer is not None:
                self.close()
            return
        if self._connections.ranks:
            return
        if self._is_over:
            self._over.set()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout, self._give_up)
            most = self._timeout
            text = "waiting %g s at most (--set drain-timeout) for %s"
            log.info(text, most, self._awaited, extra={"event": "clients-awaited"})

    @property
    def _is_over(self) -> bool:
        return self._everybody_knows and not self._core.pending_store_work

    @property
    def _everybody_knows(self) -> bool:
        core = self._core  # that a run is finished was the last that producers heard
        return core.deserted and (core.finished or self._connections.end_is_known)

    @property
    def _awaited(self) -> str:
        if not self._core.deserted:
            return "DP ranks that left without a goodbye to reconnect and receive the stream's end"
        if not self._connections.end_is_known:
            return "producers that ended the stream to reconnect and receive the answer"
        return "a worker to release what is left in payload stores"

    def close(self) -> None:
        """Wait for nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self._connections.ranks:
            if self._everybody_knows:
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
