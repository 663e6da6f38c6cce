"""Sends the core's requests to connected clients that open payload stores: release, list objects.

The core assigns the requests. The goodbye of the last such client is answered once the list of
releases is empty: the objects of the last step become free only when its last DP rank commits it
and leaves.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from rollout_dispatcher.core import references
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision, FreeRequested, SweepRequested
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.barrier import DurabilityBarrier
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.connections.peer import Peer

log = logging.getLogger(__name__)

#: Seconds for which a goodbye is held; a client counts it as lost after five.
HELD_SECONDS = 3.0


class StoreWorkers:
    """Connected workers by name (role and client)."""

    def __init__(
        self,
        core: DispatcherCore,
        config: ServeConfig,
        barrier: DurabilityBarrier,
        clock: Callable[[], float],
        perform: Callable[[Decision], None],
    ) -> None:
        self._core, self._barrier, self._clock, self._perform = core, barrier, clock, perform
        self._has_stores = bool(config.payload_stores)
        self._peers: dict[str, Peer] = {}
        self._held: dict[str, asyncio.TimerHandle] = {}

    def there(self, peer: Peer) -> None:
        """A peer is welcomed; the welcome is its first message."""
        if self._has_stores and peer.opens_stores:
            self._peers[str(peer)] = peer
            self._report(references.WorkerThere(str(peer)))

    def gone(self, peer: Peer) -> None:
        """A peer's connection has ended, or begins anew."""
        name = str(peer)
        if self._peers.get(name) is peer:
            del self._peers[name]
            self._let_go(name)
            self._report(references.WorkerGone(name))

    def ask(self, effect: FreeRequested | SweepRequested) -> None:
        """Send a worker the core's request, if it is still connected."""
        peer = self._peers.get(effect.worker)
        if peer is None:
            return
        if isinstance(effect, FreeRequested):
            keys = list(effect.keys)
            peer.send(m.Free(number=effect.number, store=effect.store, keys=keys))
        else:
            peer.send(m.Sweep(number=effect.number, store=effect.store, prefix=effect.prefix))

    def answered(self, peer: Peer, message: m.Freed | m.Swept) -> None:
        """A worker has answered a request."""
        name = str(peer)
        if message.why:
            fields = {"event": "release-failed", "peer": name}
            text = "%s could not release objects, which is tried again: %s"
            log.warning(text, name, message.why, extra=fields)
        if isinstance(message, m.Freed):
            self._report(references.Freed(name, message.number, tuple(message.left)))
        else:
            keys, failed = tuple(message.keys), bool(message.why)
            self._report(references.Swept(name, message.number, keys, message.more, failed))
        self._let_go_if_done()

    def acknowledge_bye(self, peer: Peer) -> None:
        """Answer a goodbye behind earlier messages, once the peer is not needed."""
        name = str(peer)
        if self._peers.get(name) is not peer:
            self._barrier.after(peer.acknowledge_bye)
            return
        self._report(references.WorkerLeaves(name))
        loop = asyncio.get_running_loop()
        self._held[name] = loop.call_later(HELD_SECONDS, partial(self._let_go, name))
        self._let_go_if_done()

    def _let_go_if_done(self) -> None:
        for name in [name for name in self._held if not self._core.is_last_to_free(name)]:
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        """Answer the held goodbye of a peer, if there is one."""
        if (timer := self._held.pop(name, None)) is None:
            return
        timer.cancel()
        if (peer := self._peers.get(name)) is not None:
            self._barrier.after(peer.acknowledge_bye)

    def _report(self, what: references.WorkerEvent) -> None:
        self._perform(self._core.on_worker_event(what, self._clock()))
