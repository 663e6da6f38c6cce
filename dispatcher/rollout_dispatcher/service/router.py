"""The router: turns messages of peers into calls on the core, and has its decisions performed.

It runs on one event loop, so the core handles one event at a time. It decides nothing itself.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollout_dispatcher import errors
from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision, PushAnswered
from rollout_dispatcher.errors import DispatcherError, IllegalTransition
from rollout_dispatcher.hints import harmless
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.assemble import samples_of
from rollout_dispatcher.sample import Sample
from rollout_dispatcher.service import reporter
from rollout_dispatcher.service.access import Access, Rights, digest_of
from rollout_dispatcher.service.barrier import DurabilityBarrier, Log
from rollout_dispatcher.service.completion import Completion, Failure
from rollout_dispatcher.service.config.checks import check_push
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.connections.connections import Connections
from rollout_dispatcher.service.connections.descriptors import ConnectionLimits
from rollout_dispatcher.service.connections.peer import Peer
from rollout_dispatcher.service.connections.receiving import Receiving
from rollout_dispatcher.service.connections.store_workers import StoreWorkers
from rollout_dispatcher.service.effects import EffectRunner
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.ranks import Ranks
from rollout_dispatcher.service.reloading import RELOADABLE, Reloads
from rollout_dispatcher.service.reporter import Health
from rollout_dispatcher.service.step_trace import StepTrace
from rollout_dispatcher.transport.listener import Pending

log = logging.getLogger(__name__)

#: Handles messages of a type: called with the peer, the message and the time.
Handler = Callable[[Peer, Any, float], object]


class Router:
    """Everything that is connected, and the one core in the middle."""

    def __init__(
        self,
        config: ServeConfig,
        core: DispatcherCore,
        metrics: Metrics,
        clock: Callable[[], float],
        journal: Log | None = None,
        *,
        access: Access | None = None,
        limits: ConnectionLimits | None = None,
        read: ServeConfig | None = None,
        step_trace: StepTrace | None = None,
    ) -> None:
        self.access = access or Access()
        self.config = config
        self.limits = limits or config.connection_limits
        self.pending = Pending(self.limits.pending, clock)
        self.http_pending = Pending(self.limits.pending, clock)
        self.core = core
        self.metrics = metrics
        self.clock = clock
        self.step_trace = step_trace or StepTrace(clock)
        self.receiving = Receiving(config.received_bytes, config.request_timeout)
        metrics.receiving = self.receiving
        metrics.pending = {"sample": self.pending, "http": self.http_pending}
        self._connections = Connections()
        self._failure = Failure()
        self.barrier = DurabilityBarrier(journal, self._failure, self._journal_takes_more)
        self.health = Health(core, lambda: self.barrier.failure, clock)
        metrics.is_ready = self.health.is_ready
        if journal is not None:
            core.set_journal_capacity(self.barrier.has_capacity)
            core.watch_journal(self.barrier.is_slow)
        self._store_workers = StoreWorkers(core, config, self.barrier, clock, self.perform)
        self._effect_runner = EffectRunner(
            core,
            config,
            self._connections,
            self.barrier,
            self._failure,
            metrics=metrics,
            step_trace=self.step_trace,
            store_workers=self._store_workers,
            clock=clock,
        )
        self._ranks = Ranks(
            core,
            config,
            self._connections,
            metrics=metrics,
            step_trace=self.step_trace,
            store_workers=self._store_workers,
            perform=self.perform,
        )
        self._handlers: dict[type[m.Message], Handler] = {
            m.Ping: self._pinged,
            m.Bye: self._says_goodbye,
            m.HelloProducer: self._producer_joins,
            m.HelloRank: self._rank_joins,
            m.CloseGroup: self._close_group,
            m.EndPhase: self._end_phase,
            m.EndStream: self._end_stream,
            m.Freed: self._answered_by_store,
            m.Swept: self._answered_by_store,
        }
        self.feedback = self._effect_runner.feedback
        self.drops_log = self._effect_runner.drops_log
        self._next_word = clock()
        #: Why nothing more is taken, once nothing is.
        self.stopping: errors.Stopping | None = None
        self._everybody_left = asyncio.Event()
        self._hangs_up = False
        self._completion = Completion(core, self._connections, config.drain_timeout)
        self.reloads = Reloads(
            read or config,
            self._configure,
            lambda outcome: metrics.config_reloads.labels(outcome).inc(),
        )

    # -- peers report (peer.PeerListener) -------------------------------------------------------

    def admits(self) -> DispatcherError | None:
        """Refuse connections beyond the limit, which counts those that have sent a hello."""
        limit = self.limits.sample
        return errors.ConnectionLimit(limit) if self._connections.num_introduced >= limit else None

    def connected(self, peer: Peer) -> None:
        """A connection was made; it counts for its role from its hello on."""
        error = errors.MadeRoom(self.limits.pending)
        place = self.pending.enter(lambda: peer.make_room(error))
        self._connections.connected(peer, place)

    def _introduce(self, peer: Peer, message: m.Hello) -> None:
        """Admit a peer with its hello, so that it is pending no more. Raises DispatcherError."""
        peer.rights = self.access.rights(message.token, self.clock())
        if isinstance(message, m.HelloRank):
            _check_control(peer, "take a DP rank's place")
        if self._connections.is_pending(peer):
            if (refusal := self.admits()) is not None:
                raise refusal
            self._connections.introduced(peer)

    def on_message(self, peer: Peer, message: m.Message, spans: Sequence[memoryview]) -> None:
        """Handle a legal message of a peer; raises DispatcherError for the peer's own faults.

        Effects are guarded apart, so that of our own bugs only an IllegalTransition of the core may
        look like a peer's fault here.
        """
        try:
            now = self.clock()
            if type(message) is m.Push:
                self._push(peer, message, spans, now)
            else:
                self._handlers.get(type(message), self._ranks.on_message)(peer, message, now)
        except IllegalTransition as bug:
            self._failure.fail(bug)
        except DispatcherError:
            raise
        except Exception as error:
            self._failure.fail(error)
        # Ranks are always read from: their commits free the journal's room.
        if peer.role != "producer" or not self.barrier.message_handled(peer):
            self._answered(peer, peer.readable_since)
            return
        self.barrier.after(partial(self.receiving.durable, self.receiving.queued(peer)))
        self.barrier.after(partial(self._answered, peer, peer.readable_since))

    def _answered(self, peer: Peer, since: float | None) -> None:
        """Observe how long a message waited and took. since: when it could be read, if known."""
        seconds = 0.0 if since is None else asyncio.get_running_loop().time() - since
        self.metrics.message_duration.observe(seconds, peer.role)

    def _push(self, peer: Peer, message: m.Push, spans: Sequence[memoryview], now: float) -> None:
        check_push(message, opens_stores=peer.opens_stores)
        samples = samples_of(message, spans, self.config.group_size)
        push = Push(
            peer.client_id, message.first_seq, samples, message.floor, message.named,
            has_references=message.objects is not None,
        )  # fmt: skip
        self.metrics.loss_positions_left_out.inc(message.left_out)
        self.perform(self.core.push(push, now))

    def _close_group(self, peer: Peer, message: m.CloseGroup, now: float) -> None:
        group, size, who = message.group_id, message.size, peer.client_id
        if message.withdrawn is not None:
            self.perform(self.core.withdraw(group, size, who, message.withdrawn, now))
            return
        request = None if message.number is None else (who, message.number)
        self.perform(
            self.core.close_group(group, now, size=size, keep=message.keep, request=request)
        )

    def _end_phase(self, peer: Peer, message: m.EndPhase, now: float) -> None:
        who, force = peer.client_id, message.force
        if force:
            _check_control(peer, FORCE)
        self.perform(self.core.end_phase(message.policy_version, now, who, force=force))

    def _end_stream(self, peer: Peer, message: m.EndStream, now: float) -> None:
        who, force = peer.client_id, message.force
        if force:
            _check_control(peer, FORCE)
        self._connections.ends(who)
        self.perform(self.core.end_stream(now, who, force=force))

    def _pinged(self, peer: Peer, message: m.Ping, now: float) -> None:
        if peer.role == "producer":
            # It confirms the producer's messages before it; a rank repeats its own in its hello.
            self.barrier.after(partial(self._confirm, peer))
            return
        rank = self._connections.rank_of(peer)
        if rank is None:
            peer.send(m.Pong())
            return
        self.core.progressed(rank.dp_rank, message.handed_out, message.collectives, now)
        waits = rank.dp_rank in self.metrics.waiting_since
        waits = waits or self.core.waits_to_finish(rank.dp_rank)
        peer.send(m.Pong(waits_for=self._effect_runner.explain_delay() if waits else ""))

    def lost(self, peer: Peer, reason: str) -> None:
        """A connection is over."""
        self._failure.guard(self._lost, peer, reason)

    def _lost(self, peer: Peer, reason: str) -> None:
        connections, for_good = self._connections, reason == "bye"
        connections.lost(peer)
        gone = connections.clients.lost(peer.client_id, peer, reason)
        if not self._hangs_up:
            self._store_workers.gone(peer)
        if not connections.peers:
            self._everybody_left.set()
        if self._hangs_up:  # this process ends: nothing changes for the core
            return
        if not for_good:
            self.metrics.connection_errors.labels(peer.role, reason).inc()
        if connections.producers.get(peer.client_id) is peer:
            del connections.producers[peer.client_id]
            connections.left(peer.client_id, for_good=for_good)
            if gone is not None:
                reporter.producer_gone(gone, reason)
            self.perform(
                self.core.producer_disconnected(peer.client_id, self.clock(), for_good=for_good)
            )
        if (rank := connections.rank_of(peer)) is not None:
            connections.detach(peer.client_id)
            self.metrics.waiting_since.pop(rank.dp_rank, None)
            reporter.rank_gone(rank.dp_rank, peer.client_id, peer.host, reason)
            self.perform(
                self.core.leave(rank.dp_rank, peer.client_id, self.clock(), for_good=for_good)
            )
        self._completion.check()

    def _journal_takes_more(self) -> None:
        self.perform(self.core.journal_takes_more(self.clock()))
        self.feedback.changed()

    def perform(self, decision: Decision) -> None:
        """Have the core's decision carried out."""
        self._effect_runner.perform(decision)
        self._completion.check()

    def _configure(self, config: ServeConfig) -> None:
        """Apply changed settings, as far as they may change."""
        update = {name: getattr(config, name) for name in RELOADABLE}
        self.config = self.config.model_copy(update=update)
        self.metrics.configured(self.config, self.reloads.generation)
        self.step_trace.configured(update)
        self._effect_runner.configure(self.config)
        self.perform(self.core.configure(core_config(self.config).tuning, self.clock()))

    # -- producers --------------------------------------------------------------------------

    def push_now(self, samples: tuple[Sample, ...], *, named: bool) -> PushAnswered:
        """Push on behalf of an HTTP request; samples without room are answered `full`."""
        push = Push("", 0, samples, 0, named)
        decision = self.ask(partial(self.core.push, push, self.clock(), may_wait=False))
        return next(effect for effect in decision.effects if isinstance(effect, PushAnswered))

    def ask(self, call: Callable[[], Decision]) -> Decision:
        """Call the core on behalf of an HTTP request, and perform its decision.

        Raises DispatcherError for the client's faults, and any other error for a bug of ours, which
        ends the service.
        """
        decision = self._failure.guard_asking(call)
        self.perform(decision)
        return decision

    def _answered_by_store(self, peer: Peer, message: m.Freed | m.Swept, _now: float) -> None:
        self._store_workers.answered(peer, message)

    def _says_goodbye(self, peer: Peer, _message: m.Bye, _now: float) -> None:
        if self._connections.producers.get(peer.client_id) is peer:
            self.perform(self.core.producer_leaves(peer.client_id, self.clock()))
        self._store_workers.acknowledge_bye(peer)

    def _confirm(self, peer: Peer) -> None:
        peer.send(m.Pong())
        if self._connections.producers.get(peer.client_id) is peer:
            self._connections.answered(peer.client_id)
            self._completion.check()

    def _rank_joins(self, peer: Peer, message: m.HelloRank, now: float) -> None:
        self._introduce(peer, message)
        self._ranks.on_hello(peer, message, now)

    def _producer_joins(self, peer: Peer, message: m.HelloProducer, now: float) -> None:
        self._introduce(peer, message)
        key = digest_of(message.key)
        self.core.check_key(peer.client_id, key)
        before = self._connections.producers.get(peer.client_id)
        self._connections.producers[peer.client_id] = peer
        self._connections.clients.joined(peer.client_id, "producer", peer.host, peer)
        if before is not None:
            self.perform(self.core.producer_disconnected(peer.client_id, now))
            before.close()
        self.metrics.connections.labels("producer").inc()
        incarnation, accepted = message.incarnation or "", message.accepted
        self.perform(self.core.producer_connected(peer.client_id, key, incarnation, accepted))
        self._store_workers.there(peer)

    # -- the end ----------------------------------------------------------------------------

    async def finished(self) -> None:
        """Return when all is committed and all clients have left. Raises the service's failure."""
        await self._completion.over(self._failure.future)

    def close_silent(self, away: float) -> None:
        """Close the connections of clients that have completed no message for too long.

        A live client connects again; the place of a dead one is free for its successor. away:
        seconds since the last call in which this process was stopped, or its clock jumped. Messages
        of that time are still to be read, so it does not count, nor does a pause of reading.
        """
        config, now = self.config, self.clock()
        watched = [(peer, config.idle_timeout) for peer in self._connections.producers.values()]
        watched += [(rank.peer, config.rank_timeout) for rank in self._connections.ranks.values()]
        for peer, timeout in watched:
            silence = now - peer.last_received if peer.held else away
            peer.last_received = min(now, peer.last_received + silence)
            if now - peer.last_received > timeout:
                fields = {"event": "client-silent", "peer": str(peer)}
                text = "%s was silent for %g s; closing its connection"
                log.warning(text, peer, timeout, extra=fields)
                peer.close("silent")

    def keep_pace(self, away: float) -> None:
        """Reject frames that come too slowly, and send `Blocked` to peers that wait for room.

        Their pings stand behind the waiting frame, so no other message shows them that the
        dispatcher is alive. away: as above.
        """
        now, receiving = self.clock(), self.receiving
        for peer in receiving.too_slow(now, away):
            if isinstance(peer, Peer):
                peer.fail(errors.FrameTooSlow(peer.filled or 0, receiving.patience))
        if now < self._next_word:
            return
        self._next_word = now + self.config.heartbeat_interval
        word = m.Blocked(cap="receive-bytes", held=receiving.nbytes, capacity=receiving.limit)
        for who in receiving.waiting:
            if isinstance(who, Peer):
                who.write(codec.encode(word))

    def pushed_over_http(self, host: str, accepted: int, error: str) -> None:
        """A request from that host was answered. error: why it, or a sample of it, was refused."""
        self._connections.clients.pushed_over_http(host, accepted, harmless(error), self.clock())

    def clients(self) -> list[dict[str, Any]]:
        """Clients of both planes, as JSON can hold them."""
        return self._connections.clients.as_json(self.clock())

    def fail(self, error: BaseException) -> None:
        """The service cannot go on; `finished` raises the first such error."""
        self._failure.fail(error)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the service, if any has."""
        return self._failure.error

    def drain(self) -> None:
        """Accept nothing more; dispatch the buffered samples, then end the ranks' streams."""
        self.stopping = errors.Stopping("the dispatcher is shutting down")
        self.perform(self.core.drain(self.clock()))

    def stop(self, why: str) -> None:
        """Close all connections with a retriable error: clients go on with the next process."""
        self.stopping = errors.Stopping(why)
        for peer in list(self._connections.peers):
            peer.fail(errors.Stopping(why))

    async def hang_up(self) -> None:
        """End every connection; returns once all are over, which has a deadline.

        Written bytes are sent first. The core gets no event of it.
        """
        self._hangs_up = True
        self._everybody_left.clear()
        for peer in list(self._connections.peers):
            peer.hang_up()
        if self._connections.peers:
            await self._everybody_left.wait()

    def close(self) -> None:
        """Close all connections and timers at once; no effect is performed any more."""
        self._hangs_up = True
        for peer in list(self._connections.peers):
            peer.hang_up()
        self._completion.close()
        self._effect_runner.close()
        self._failure.cancel()


#: The action that takes more than a producers' token.
FORCE = "end for all producers (force)"


def _check_control(peer: Peer, what: str) -> None:
    """Raise Forbidden for a peer with a producers' token alone. what: the action, in words."""
    if peer.rights is Rights.PUSH:
        raise errors.Forbidden(what)
