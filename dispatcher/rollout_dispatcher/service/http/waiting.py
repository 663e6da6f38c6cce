"""Requests that are held while a cap is reached: `POST /v1/samples?wait=5s`.

They wait in line. The first tries again whenever something may have made room, and now and then.
Invariant: what waits is bounded in number, bytes and time, and is let go of when its client hangs
up or we stop.
"""

import asyncio
from contextlib import suppress

from aiohttp import web

from rollout_dispatcher.service.http.bodies.pieces import in_pieces
from rollout_dispatcher.service.http.places import HttpPlaces
from rollout_dispatcher.service.http.sample_push import RETRY_AFTER_SECONDS, SamplePush
from rollout_dispatcher.service.router import Router


class WaitingPushes:
    """The line of one router, of as many as `--max-waiting-bodies` and `--held-bytes` say."""

    def __init__(self, router: Router, places: HttpPlaces) -> None:
        self._router, self._places = router, places
        self._line = asyncio.Lock()
        self._number = self._nbytes = 0
        self._max_number = router.config.max_waiting_bodies
        self._max_nbytes = router.config.held_memory

    async def wait(self, request: web.Request, push: SamplePush, seconds: float) -> None:
        """Try what found no room again, for so long; at once back where too much waits already."""
        nbytes = push.nbytes
        if self._number >= self._max_number or self._nbytes + nbytes > self._max_nbytes:
            return
        self._number, self._nbytes = self._number + 1, self._nbytes + nbytes
        try:
            with self._places.cancelled_when_lost(request.protocol), suppress(TimeoutError):
                async with asyncio.timeout(seconds), self._line:
                    await self._try_again(push)
        finally:
            self._number, self._nbytes = self._number - 1, self._nbytes - nbytes

    async def _try_again(self, push: SamplePush) -> None:
        router = self._router
        while router.stopping is None and router.barrier.failure is None:
            moves = router.feedback.moves
            await in_pieces(push.attempt(router, all_of_them=False))
            if not push.is_full:
                return
            # As a client would that was told so: at a hard cap ranks get a smaller step for those
            # alone who keep asking.
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_AFTER_SECONDS):
                    await router.feedback.next_move(moves)
