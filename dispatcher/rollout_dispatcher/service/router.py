"""The router: carries what peers say to the core, and has its answers performed.

It runs on one event loop, so the core sees one event at a time, and decides nothing itself.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollout_dispatcher import errors
from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import NOTHING, Decision, PushAnswered
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.steps.rank_state import CheckpointPosition, RankHello, Unresolved
from rollout_dispatcher.errors import DispatcherError, IllegalTransition
from rollout_dispatcher.hints import harmless
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.assemble import samples_of
from rollout_dispatcher.protocol.sessions import FROM_RANK
from rollout_dispatcher.sample import Sample
from rollout_dispatcher.service import reporter
from rollout_dispatcher.service.access import Access, Rights, digest_of
from rollout_dispatcher.service.barrier import DurabilityBarrier, Log
from rollout_dispatcher.service.completion import Completion, Failure
from rollout_dispatcher.service.config.checks import check_padding, check_push, check_rank
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.connections.connections import Connections
from rollout_dispatcher.service.connections.descriptors import ConnectionLimits
from rollout_dispatcher.service.connections.peer import Peer
from rollout_dispatcher.service.connections.receiving import Receiving
from rollout_dispatcher.service.connections.store_workers import StoreWorkers
from rollout_dispatcher.service.effects import EffectRunner
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.reloading import RELOADABLE, Reloads
from rollout_dispatcher.service.reporter import Health
from rollout_dispatcher.service.step_trace import StepTrace
from rollout_dispatcher.transport.listener import Pending

log = logging.getLogger(__name__)

#: What DP ranks alone say. By its type, as to try one kind after the other takes longer than most
#: messages do.
OF_RANKS = frozenset(FROM_RANK) - {m.Freed, m.Swept, m.Ping}


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
        """Refuse connections beyond the limit, to which those count that have said hello."""
        limit = self.limits.sample
        return errors.ConnectionLimit(limit) if self._connections.num_introduced >= limit else None

    def connected(self, peer: Peer) -> None:
        """A connection was made; it counts for its role once it has said hello."""
        error = errors.MadeRoom(self.limits.pending)
        place = self.pending.enter(lambda: peer.make_room(error))
        self._connections.connected(peer, place)

    def _introduce(self, peer: Peer, message: m.Hello) -> None:
        """It may say who it is, and is pending no more. Raises DispatcherError otherwise."""
        peer.rights = self.access.rights(message.token, self.clock())
        if isinstance(message, m.HelloRank):
            _check_control(peer, "take a DP rank's place")
        if self._connections.is_pending(peer):
            if (refusal := self.admits()) is not None:
                raise refusal
            self._connections.introduced(peer)

    def said(self, peer: Peer, message: m.Message, spans: Sequence[memoryview]) -> None:
        """A peer sent a legal message; raises what is its own fault.

        What is performed for it is guarded for itself, so that of our own errors only those of the
        core's tables come here as one that a peer might have made.
        """
        try:
            if type(message) in OF_RANKS:
                self._hear_rank(peer, message)
            else:
                self._hear(peer, message, spans)
        except IllegalTransition as bug:
            self._failure.fail(bug)
        except DispatcherError:
            raise
        except Exception as error:
            self._failure.fail(error)
        # Ranks are heard always: their commits free the journal's room.
        if peer.role != "producer" or not self.barrier.message_handled(peer):
            self._answered(peer, peer.readable_since)
            return
        self.barrier.after(partial(self.receiving.durable, self.receiving.queued(peer)))
        self.barrier.after(partial(self._answered, peer, peer.readable_since))

    def _answered(self, peer: Peer, since: float | None) -> None:
        """A message was answered that can be read since then; None where no turns are taken."""
        seconds = 0.0 if since is None else asyncio.get_running_loop().time() - since
        self.metrics.message_duration.observe(seconds, peer.role)

    def _hear(self, peer: Peer, message: m.Message, spans: Sequence[memoryview]) -> None:
        now = self.clock()
        match message:
            case m.Ping():
                self._pinged(peer, message, now)
            case m.Bye():
                self._says_goodbye(peer)
            case m.HelloProducer():
                self._introduce(peer, message)
                self._producer_joins(peer, message)
            case m.HelloRank():
                self._introduce(peer, message)
                self._rank_joins(peer, message, now)
            case m.Push():
                check_push(message, opens_stores=peer.opens_stores)
                samples = samples_of(message, spans, self.config.group_size)
                push = Push(
                    peer.client_id, message.first_seq, samples, message.floor, message.named,
                    has_references=message.objects is not None,
                )  # fmt: skip
                self.metrics.loss_positions_left_out.inc(message.left_out)
                self.perform(self.core.push(push, now))
            case m.CloseGroup(group_id=group, withdrawn=list(numbers)):
                size, who = message.size, peer.client_id
                self.perform(self.core.withdraw(group, size, who, numbers, now))
            case m.CloseGroup():
                said = None if message.number is None else (peer.client_id, message.number)
                closed = self.core.close_group(
                    message.group_id, now, size=message.size, keep=message.keep, request=said
                )
                self.perform(closed)
            case m.EndPhase() | m.EndStream():
                self._hear_end(peer, message, now)
            case m.Freed() | m.Swept():
                self._store_workers.answered(peer, message)

    def _hear_end(self, peer: Peer, message: m.EndPhase | m.EndStream, now: float) -> None:
        who, force = peer.client_id, message.force
        if force:
            _check_control(peer, "end for all producers (force)")
        if isinstance(message, m.EndPhase):
            self.perform(self.core.end_phase(message.policy_version, now, who, force=force))
        else:
            self._connections.ends(who)
            self.perform(self.core.end_stream(now, who, force=force))

    def _pinged(self, peer: Peer, message: m.Ping, now: float) -> None:
        if peer.role == "producer":
            # It confirms what the producer said before; a rank repeats itself in its hello.
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
        if self._hangs_up:  # it is we who leave: the core goes on as it is, if at all
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
        """Heed settings that have changed, as far as they may."""
        update = {name: getattr(config, name) for name in RELOADABLE}
        self.config = self.config.model_copy(update=update)
        self.metrics.configured(self.config, self.reloads.generation)
        self.step_trace.configured(update)
        self._effect_runner.configure(self.config)
        self.perform(self.core.configure(core_config(self.config).tuning, self.clock()))

    # -- producers --------------------------------------------------------------------------

    def push_now(self, samples: tuple[Sample, ...], *, named: bool) -> PushAnswered:
        """Push on behalf of an HTTP request; what finds no room is answered `full`."""
        push = Push("", 0, samples, 0, named)
        decision = self.ask(partial(self.core.push, push, self.clock(), may_wait=False))
        return next(effect for effect in decision.effects if isinstance(effect, PushAnswered))

    def ask(self, say: Callable[[], Decision]) -> Decision:
        """Tell the core something on behalf of an HTTP request, and perform what it decides.

        Raises DispatcherError for what is the client's fault; for a bug of ours, which ends the
        service, what that has raised.
        """
        decision = self._failure.guard_asking(say)
        self.perform(decision)
        return decision

    def _says_goodbye(self, peer: Peer) -> None:
        if self._connections.producers.get(peer.client_id) is peer:
            self.perform(self.core.producer_leaves(peer.client_id, self.clock()))
        self._store_workers.acknowledge_bye(peer)

    def _confirm(self, peer: Peer) -> None:
        peer.send(m.Pong())
        if self._connections.producers.get(peer.client_id) is peer:
            self._connections.answered(peer.client_id)
            self._completion.check()

    def _producer_joins(self, peer: Peer, message: m.HelloProducer) -> None:
        key = digest_of(message.key)
        self.core.check_key(peer.client_id, key)
        before = self._connections.producers.get(peer.client_id)
        self._connections.producers[peer.client_id] = peer
        self._connections.clients.joined(peer.client_id, "producer", peer.host, peer)
        if before is not None:
            self.perform(self.core.producer_disconnected(peer.client_id, self.clock()))
            before.close()
        self.metrics.connections.labels("producer").inc()
        incarnation, accepted = message.incarnation or "", message.accepted
        self.perform(self.core.producer_connected(peer.client_id, key, incarnation, accepted))
        self._store_workers.there(peer)

    # -- ranks ------------------------------------------------------------------------------

    def _rank_joins(self, peer: Peer, message: m.HelloRank, now: float) -> None:
        check_padding(self.config, message.packed_length)
        check_rank(self.config, opens_stores=peer.opens_stores, max_split=message.max_split or 1)
        hello = RankHello(
            client_id=message.client_id,
            dp_rank=message.dp_rank,
            dp_size=message.dp_size,
            generation=message.generation,
            prefetch_steps=message.prefetch_steps,
            taken=message.taken,
            committed=message.committed,
            hungry=message.hungry,
            received=dict(message.received),
            attempts=dict(message.attempts),
            released=message.released,
            resume=_position(message.resume),
            saved=message.saved,
            run_id=message.run_id,
            training={"layout": str(self.config.layout)} | message.training,
            finished=message.finished,
            discards=message.discard,
        )
        self._store_workers.gone(peer)  # said again, it hears nothing else before its welcome
        decision = self.core.join(hello, now)
        if hello.generation is None:
            self.metrics.waiting_since.clear()
            if self._connections.rank_of(peer) is not None:  # it leaves its own place itself
                self._connections.detach(peer.client_id)
        self._connections.said_hello(peer)
        self.perform(decision)
        if self._connections.rank_of(peer) is None:
            return  # it was refused
        self._store_workers.there(peer)
        log.info(
            "DP rank %d of %d joined generation %d",
            message.dp_rank, message.dp_size, self.core.generation,
            extra={"event": "rank-joined", "dp_rank": message.dp_rank, "peer": str(peer)},
        )  # fmt: skip
        self.metrics.packed_lengths[message.dp_rank] = message.packed_length or 0
        self._note_hunger(message.dp_rank, hungry=message.hungry, now=now)
        if message.policy_version is not None:
            first_step = message.policy_step or 0
            self.perform(self.core.set_policy_version(message.policy_version, now, first_step))

    def _hear_rank(self, peer: Peer, message: m.Message) -> None:
        if (rank := self._connections.rank_of(peer)) is None:
            return
        dp_rank, now = rank.dp_rank, self.clock()
        self.core.seen(dp_rank, now)
        match message:
            case m.Demand():
                self._note_hunger(dp_rank, hungry=message.hungry, now=now)
                self.perform(self.core.demand(dp_rank, message.taken, now, hungry=message.hungry))
                self.step_trace.taken(dp_rank, message.taken, now)
            case m.Prepared():
                step, digest, attempt = message.step, message.digest, message.attempt
                self.perform(self.core.prepared(dp_rank, step, digest, now, attempt=attempt))
            case m.Unresolved(step=step, attempt=attempt, sample_ids=ids, why=why):
                said = Unresolved(step, attempt, tuple(ids), why)
                self.perform(self.core.unresolved(dp_rank, said, now))
            case m.Commit():
                self.step_trace.rank_commits(dp_rank, message.step, now)
                self.perform(self.core.commit(dp_rank, message.step, now))
                for times in message.times or ():
                    self._took(dp_rank, message.step, times)
            case m.PolicyVersion():
                version, first_step = message.policy_version, message.first_step
                self.perform(self.core.set_policy_version(version, now, first_step))
            case m.Finish():
                self.metrics.waiting_since.pop(dp_rank, None)
                self.perform(self.core.finish(dp_rank, message.step, now, discard=message.discard))
            case m.CheckpointSaved():
                self.perform(self.core.checkpoint_saved(dp_rank, message.step))
            case m.StepTimes():
                self._took(dp_rank, message.step, message)

    def _took(self, dp_rank: int, step: int, told: m.PassTimes) -> None:
        times = RankTimes(step, told.cost_key, told.busy_s, told.collective_s, told.why)
        self.step_trace.measured(dp_rank, times)
        if (decision := self.core.step_times(dp_rank, times)) is not NOTHING:
            self.perform(decision)

    def _note_hunger(self, dp_rank: int, *, hungry: bool, now: float) -> None:
        waiting_since = self.metrics.waiting_since
        if hungry:
            waiting_since.setdefault(dp_rank, now)  # said again, it is the same wait
        elif (since := waiting_since.pop(dp_rank, None)) is not None:
            self.metrics.rank_wait_duration.observe(now - since)
            self.step_trace.waited(dp_rank, since, now - since)

    # -- the end ----------------------------------------------------------------------------

    async def finished(self) -> None:
        """Return when everything is committed and everybody has left. Raises what broke us."""
        await self._completion.over(self._failure.future)

    def close_silent(self, away: float) -> None:
        """Close the connections of clients of whom no message became whole for too long.

        A live client connects again; the place of one that is not is free for its successor.
        away: seconds since the last look in which this process was stopped, or its clock jumped.
        What clients said meanwhile is still to be read, so these seconds are not held against them,
        nor is the time in which they are not read from.
        """
        config, now = self.config, self.clock()
        watched = [(peer, config.idle_timeout) for peer in self._connections.producers.values()]
        watched += [(rank.peer, config.rank_timeout) for rank in self._connections.ranks.values()]
        for peer, timeout in watched:
            unheard = now - peer.last_heard if peer.held else away
            peer.last_heard = min(now, peer.last_heard + unheard)
            if now - peer.last_heard > timeout:
                fields = {"event": "client-silent", "peer": str(peer)}
                text = "%s was silent for %g s; closing its connection"
                log.warning(text, peer, timeout, extra=fields)
                peer.close("silent")

    def keep_pace(self, away: float) -> None:
        """End frames that come too slowly, and tell those who wait for room that we are alive.

        They say their pings behind what waits, and would take us for dead. away: as above.
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
        """Something broke that we cannot go on without; `finished` raises the first such error."""
        self._failure.fail(error)

    @property
    def failure(self) -> BaseException | None:
        """What has broken, if anything has."""
        return self._failure.error

    def drain(self) -> None:
        """Accept nothing more; dispatch what is here, and end the ranks."""
        self.stopping = errors.Stopping("the dispatcher is shutting down")
        self.perform(self.core.drain(self.clock()))

    def stop(self, why: str) -> None:
        """Send everybody away who may come back to the next process."""
        self.stopping = errors.Stopping(why)
        for peer in list(self._connections.peers):
            peer.fail(errors.Stopping(why))

    async def hang_up(self) -> None:
        """End every connection; returns once all are over, which has a deadline.

        What was written is sent first. The core is told of none.
        """
        self._hangs_up = True
        self._everybody_left.clear()
        for peer in list(self._connections.peers):
            peer.hang_up()
        if self._connections.peers:
            await self._everybody_left.wait()

    def close(self) -> None:
        """Let go of everything, at once; nothing is performed any more."""
        self._hangs_up = True
        for peer in list(self._connections.peers):
            peer.hang_up()
        self._completion.close()
        self._effect_runner.close()
        self._failure.cancel()


def _check_control(peer: Peer, what: str) -> None:
    """Raise Forbidden if it has shown a producers' token alone. what: it does, in words."""
    if peer.rights is Rights.PUSH:
        raise errors.Forbidden(what)


def _position(resume: m.CheckpointPosition | None) -> CheckpointPosition | None:
    if resume is None:
        return None
    return CheckpointPosition(resume.run_id, resume.step, resume.allow_lost_steps)
