"""When the service may stop by itself: everything is committed, and everybody has heard so.

Invariant: nobody who is connected is left without a word; who went without a goodbye is waited for,
within a bound, and so is somebody who releases what is left in payload stores.
"""

import asyncio
import logging

from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.errors import NotServing
from rollout_dispatcher.service.connections.connections import Connections

log = logging.getLogger(__name__)


class Completion:
    """Waits for the end of a run; timeout: seconds that the absent have to come back."""

    def __init__(self, core: Dispatch, connections: Connections, timeout: float) -> None:
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
            log.info("waiting %g s at most (--drain-timeout) for %s", self._timeout, self._awaited)

    @property
    def _is_over(self) -> bool:
        return self._everybody_knows and not self._core.unreleased

    @property
    def _everybody_knows(self) -> bool:
        core = self._core  # that a run is finished was the last that producers heard
        return core.deserted and (core.finished or self._connections.end_is_known)

    @property
    def _awaited(self) -> str:
        if not self._core.deserted:
            return "DP ranks that left without a goodbye to come back and hear of the end"
        if not self._connections.end_is_known:
            return "producers that ended the stream to come back and hear that it was heard"
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
                    self._core.unreleased,
                )
            else:
                log.warning("a client left without a goodbye and did not come back")
            self._over.set()
