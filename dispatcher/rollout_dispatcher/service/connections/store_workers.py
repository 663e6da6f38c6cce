"""Clients that open payload stores, as far as they are connected: asked to release objects.

The core says who is to do what. Whoever says goodbye while nobody else is there is held for a
moment, until the list of releases is empty: what the last step has used up is known only when its
last DP rank commits it, and leaves.
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

#: How long a goodbye is held; a client waits for five seconds, and takes it for a loss then.
HELD_SECONDS = 3.0


class StoreWorkers:
    """By name: the client's, behind its role."""

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
        """It was welcomed, or will be before it hears anything else."""
        if self._has_stores and peer.opens_stores:
            self._peers[str(peer)] = peer
            self._report(references.WorkerThere(str(peer)))

    def gone(self, peer: Peer) -> None:
        """Its connection is over, or begins anew."""
        name = str(peer)
        if self._peers.get(name) is peer:
            del self._peers[name]
            self._let_go(name)
            self._report(references.WorkerGone(name))

    def ask(self, effect: FreeRequested | SweepRequested) -> None:
        """Tell a worker what the core wants of it; one that has gone is not expected to answer."""
        peer = self._peers.get(effect.worker)
        if peer is None:
            return
        if isinstance(effect, FreeRequested):
            keys = list(effect.keys)
            peer.send(m.Free(number=effect.number, store=effect.store, keys=keys))
        else:
            peer.send(m.Sweep(number=effect.number, store=effect.store, prefix=effect.prefix))

    def answered(self, peer: Peer, message: m.Freed | m.Swept) -> None:
        """A worker has done what it was asked, or could not."""
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
        """It has said goodbye: answer behind what it said before, and once it is not needed."""
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
        """Answer its goodbye, if it waits for that."""
        if (timer := self._held.pop(name, None)) is None:
            return
        timer.cancel()
        if (peer := self._peers.get(name)) is not None:
            self._barrier.after(peer.acknowledge_bye)

    def _report(self, what: references.WorkerEvent) -> None:
        self._perform(self._core.on_worker_event(what, self._clock()))
