"""Performs what the core decided: frames to peers, plans, the next deadline.

Effects are carried out in the core's order, behind the barrier if anybody outside hears of them.
Ranks that fail are heard no more from the decision on, and hear of it behind the barrier; what was
decided for one generation is not told to the next. A micro-batch's frame is built only when its
peer has room for it. A planner that fails is our own bug, and stops the service rather than stall
it unseen.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVarTuple

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.limits import STORES_CAP
from rollout_dispatcher.core.decision import Decision
from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.steps.group_totals import GroupTotals
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.errors import DispatcherError, ProtocolError
from rollout_dispatcher.payload import InJournal, InMemory, Reference, are_in_memory
from rollout_dispatcher.plan import Plan
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.assemble import filler, micro_batch
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.protocol.versions import (
    FEEDBACK,
    PADDING,
    RAGGED,
    REFERENCES,
    SCHEMA,
    SHARED_MEMORY,
    Terms,
)
from rollout_dispatcher.sample import Sample
from rollout_dispatcher.service.chronicle.chronicle import Chronicle
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.connections.announcements import Announcements
from rollout_dispatcher.service.connections.connections import Connections, RankConnection
from rollout_dispatcher.service.connections.descriptors import for_segments, open_files_limit
from rollout_dispatcher.service.connections.in_flight import InFlight
from rollout_dispatcher.service.connections.peer import Bulk, Peer
from rollout_dispatcher.service.connections.store_workers import StoreWorkers
from rollout_dispatcher.service.durability.barrier import DurabilityBarrier
from rollout_dispatcher.service.failure import Failure
from rollout_dispatcher.service.feedback import Feedback
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.planner import Planner
from rollout_dispatcher.service.status.drops_log import DropsLog
from rollout_dispatcher.transport.shared_memory.sharing import share

log = logging.getLogger(__name__)

_T = TypeVarTuple("_T")

#: Effects that rest on no fact: nobody outside hears of them, or of nothing that may be forgotten.
AT_ONCE = (
    e.PlanWanted, e.ReplanWanted, e.StepPlanned, e.StepMeasured, e.SamplesAccepted,
    e.WelcomeProducer, e.RefuseRank,
)  # fmt: skip
#: What a producer hears of its push.
_Answer = e.PushAnswered | e.PushHeld | e.PushRecalled
#: Effects that are for the DP ranks of one generation.
TO_RANKS = (e.Deliver, e.Release, e.WithdrawStep, e.EndRanks)
#: How long micro-batches are handed out before others get their turn on the event loop.
DELIVERY_SLICE_SECONDS = 0.005
#: How long what the next step waits for is told in the same words.
EXPLAINED_FOR_SECONDS = 0.25
#: Micro-batches between two looks at the clock.
LOOKED_AT_EVERY = 4
#: Micro-batches of a step that is handed out whole with its headers; of a larger one every rank
#: hears before any of them gets its part.
HANDED_OUT_AT_ONCE = 8


class EffectRunner:
    """Hands for the core."""

    def __init__(
        self,
        core: Dispatch,
        config: ServeConfig,
        connections: Connections,
        barrier: DurabilityBarrier,
        failure: Failure,
        *,
        metrics: Metrics,
        chronicle: Chronicle,
        store_workers: StoreWorkers,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._barrier, self._failure = barrier, failure
        self._core = core
        self._connections = connections
        self._metrics, self._chronicle = metrics, chronicle
        self._clock = clock
        self._planner = Planner(config.plan_config(), metrics.plan_duration, clock)
        self._announcements = Announcements()
        #: Ranks, the step that they get and what they are told of its groups, the next micro-batch.
        self._deliveries: deque[tuple[RankConnection, OpenStep, GroupTotals | None, int]] = deque()
        self._in_flight = InFlight(for_segments(open_files_limit()))
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._explained_at, self._explained = -math.inf, ""
        self.feedback = Feedback(core, connections, self._run)
        self.drops_log = DropsLog()
        self._ways: dict[type[e.Effect], Callable[[Any], None]] = {
            e.WelcomeProducer: self._welcome_producer,
            e.PushAnswered: self.feedback.answer,
            e.PushHeld: self._tell_held,
            e.PushRecalled: self._recall,
            e.SchemaDecided: self._tell_schema,
            e.SamplesAccepted: chronicle.accepted,
            e.SamplesDropped: self._tell_dropped,
            e.PolicyReported: self._tell_of_policy,
            e.PayloadsToJournal: self._let_go,
            e.FreeWanted: store_workers.ask,
            e.SweepWanted: store_workers.ask,
            e.GroupGivenUp: _log_given_up,
            e.PlanWanted: self._ask,
            e.ReplanWanted: self._ask,
            e.RefuseRank: self._refuse_rank,
            e.Deliver: self._deliver,
            e.Release: self._release,
            e.WithdrawStep: self._withdraw,
            e.SamplesUnresolved: _log_unresolved,
            e.EndRanks: self._end,
            e.StepPlanned: self._observe,
            e.Redelivered: self._count_again,
            e.StepCommitted: self._forget,
            e.StepMeasured: metrics.step_measured,
            e.Rewound: _log_rewound,
            e.Drained: self._log_drained,
        }

    def configure(self, config: ServeConfig) -> None:
        """Plan with these settings from the next plan on."""
        self._config = config
        self._planner.configure(config.plan_config())

    def perform(self, decision: Decision) -> None:
        """Carry out what the core decided; then set the clock for what is due next."""
        if self._closed:  # the journal may tell the barrier of its last batches, and of its end
            return
        try:  # as `guard` does, which would be a call more for each effect
            if decision.facts:  # without which nothing may be told
                self._barrier.note(decision.facts, decision.totals)
            for effect in decision.effects:
                try:
                    self._send_on(effect)
                except Exception as error:
                    self._failure.fail(error)
            self._set_timer()
        except Exception as error:
            self._failure.fail(error)

    def _send_on(self, effect: e.Effect) -> None:
        """Do it, now or behind the barrier."""
        if isinstance(effect, AT_ONCE):
            self._do(effect)
        elif isinstance(effect, _Answer):
            asked = self._connections.producers.get(effect.producer)
            self._barrier.after(partial(self._answer, effect, asked))
        elif isinstance(effect, TO_RANKS):
            number = self._core.generation
            self._barrier.after(partial(self._tell_generation, number, effect))
        elif isinstance(effect, e.WelcomeRank):
            self._barrier.after(partial(self._welcome_rank, self._attach(effect), effect))
        elif isinstance(effect, e.FailRanks):
            self._stop_waiting(effect.client_ids)
            detached = self._connections.detach(*effect.client_ids)
            self._barrier.after(partial(_fail, detached, effect.error))
        else:
            self._barrier.after(partial(self._do, effect))

    def close(self) -> None:
        """Let go of the thread, the timer and plans that nobody waits for; perform nothing more."""
        self._closed = True
        self.drops_log.close()
        if self._timer is not None:
            self._timer.cancel()
        self.feedback.close()
        self._planner.close()

    # -- one method an effect ---------------------------------------------------------------

    def _do(self, effect: e.Effect) -> None:
        self._ways[type(effect)](effect)

    def _ask(self, effect: e.PlanWanted | e.ReplanWanted) -> None:
        if self._planner.plans_here(effect):
            # A turn later: what was written before, such as a producer's answer, leaves first.
            asyncio.get_running_loop().call_soon(self._run, self._plan_here, effect)
        else:
            self._planner.plan_in_thread(effect, partial(self._planned, effect), self._failure.fail)

    def _welcome_producer(self, effect: e.WelcomeProducer) -> None:
        if (peer := self._connections.producers.get(effect.producer)) is None:
            return
        welcome = m.WelcomeProducer(
            version=peer.terms.version,
            capabilities=sorted(peer.terms.capabilities),
            credits=effect.credits,
            max_payload_bytes=self._config.max_frame_bytes,
            payload_stores=self._stores_for(peer.terms),
            inline_limit=self._config.inline_limit if self._stores_for(peer.terms) else None,
            schema_known=self._schema_for(peer),
            max_staleness=self._config.max_staleness
            if FEEDBACK in peer.terms.capabilities
            else None,
            heartbeat_interval_s=self._config.heartbeat_interval,
        )
        peer.send(welcome)
        self.feedback.welcome(peer)

    def _stores_for(self, terms: Terms) -> list[str]:
        """The payload stores that a client may open, if it can."""
        return list(self._config.payload_stores) if REFERENCES in terms.capabilities else []

    def _schema_for(self, peer: Peer) -> m.SchemaKnown | None:
        """The run's schema, once it is decided, for a producer that can be told of it."""
        able = peer.terms.capabilities
        if SCHEMA not in able or (decided := self._core.schema) is None:
            return None
        schema, set_by = decided
        if schema.ragged and RAGGED not in able:
            return None
        return m.SchemaKnown(fields=m.field_headers(schema), set_by=set_by)

    def _tell_schema(self, effect: e.SchemaDecided) -> None:
        _log_schema(effect)
        for peer in self._connections.producers.values():
            if (told := self._schema_for(peer)) is not None:
                peer.send(told)

    def _tell_dropped(self, effect: e.SamplesDropped) -> None:
        self._chronicle.dropped(effect)
        self.drops_log.note(effect.dropped, self._clock())
        self.feedback.dropped(effect)

    def _tell_of_policy(self, effect: e.PolicyReported) -> None:
        self._chronicle.policy_reported(effect)
        self.feedback.changed()

    def _attach(self, effect: e.WelcomeRank) -> RankConnection:
        peer = self._connections.take_hello(effect.client_id)
        if peer.welcomed:  # on this connection: it has loaded a checkpoint since
            peer.forget()
        else:
            self._metrics.connections.labels("rank").inc()
        return self._connections.attach(peer, effect.dp_rank)

    def _welcome_rank(self, rank: RankConnection, effect: e.WelcomeRank) -> None:
        # What was decided before its hello and waits at the barrier too is not for this connection.
        if not self._connections.is_attached(rank):
            return
        rank.peer.welcomed = True
        terms = rank.peer.terms
        welcome = m.WelcomeRank(
            version=terms.version,
            capabilities=sorted(terms.capabilities),
            run_id=effect.run_id,
            generation=effect.generation,
            committed=effect.committed,
            max_open_steps=self._config.max_open_steps,
            layout=self._config.layout,
            payload_stores=self._stores_for(terms),
            prefetch_bytes=self._config.prefetch_bytes if self._stores_for(terms) else None,
            sample_length_multiple=(
                self._config.sample_length_multiple if PADDING in terms.capabilities else None
            ),
            heartbeat_interval_s=self._config.heartbeat_interval,
        )
        rank.peer.send(welcome)

    def _refuse_rank(self, effect: e.RefuseRank) -> None:
        self._connections.take_hello(effect.client_id).fail(effect.error)

    def _tell_generation(self, number: int, effect: e.Effect) -> None:
        """Tell the ranks of this generation; what it was to hear is void once another has begun."""
        if number == self._core.generation:
            self._do(effect)

    def _deliver(self, effect: e.Deliver) -> None:
        rank = self._connections.welcomed_rank(self._core.client_of(effect.dp_rank))
        step = self._core.step(effect.step)
        if rank is None or step is None or step.attempt != effect.attempt:
            return  # the rank is away and gets it when it comes back, or the step is planned again
        terms = rank.peer.terms
        told = self._announcements.of(step, terms)
        if told.ragged and RAGGED not in terms.capabilities:
            rank.peer.fail(_unreadable(told.ragged))
            return
        rank.peer.write(told.header)
        self._deliveries.append((rank, step, told.groups, effect.first_micro_batch))
        if len(self._deliveries) > 1:
            return  # in turn
        if len(step.micro_batches) * len(step.micro_batches[0]) <= HANDED_OUT_AT_ONCE:
            self._hand_out()
        else:
            self._later(self._hand_out)

    def _release(self, effect: e.Release) -> None:
        self._chronicle.released(effect.step)
        self._tell_ranks(effect.dp_ranks, m.Release(step=effect.step))

    def _withdraw(self, effect: e.WithdrawStep) -> None:
        self._chronicle.withdrawn(effect.step)
        self._tell_ranks(effect.dp_ranks, m.StepWithdrawn(step=effect.step))

    def _stop_waiting(self, client_ids: Iterable[str]) -> None:
        """These ranks are heard no more: they are not waiting for a step."""
        for client_id in client_ids:
            if (rank := self._connections.ranks.get(client_id)) is not None:
                self._metrics.rank_waits.stops(rank.dp_rank, self._clock())

    def _end(self, effect: e.EndRanks) -> None:
        for dp_rank in effect.dp_ranks:
            self._metrics.rank_waits.stops(dp_rank, self._clock())
        self._tell_ranks(effect.dp_ranks, m.End(reason=effect.reason))

    def _observe(self, effect: e.StepPlanned) -> None:
        # Ranks wait for the step, nobody for its metrics: a turn later.
        self._later(self._metrics.step_planned, effect)
        self.feedback.changed()

    def _count_again(self, effect: e.Redelivered) -> None:
        self._metrics.redeliveries.labels(effect.reason).inc()
        self._chronicle.redelivered(effect)

    def _forget(self, effect: e.StepCommitted) -> None:
        self._announcements.forget(effect.step)
        self._chronicle.committed(effect.step)
        self.feedback.changed()
        log.debug("step %d committed after %.3f s", effect.step, effect.seconds)

    def _log_drained(self, effect: e.Drained) -> None:
        at = self._core.statistics()
        reasons = ", ".join(f"{reason} {count}" for reason, count in at.dropped.items() if count)
        dropped = f"; of {at.accepted} accepted samples some were dropped: {reasons}"
        log.info("%s: every step is committed%s", effect.reason, dropped if reasons else "")

    def _tell_held(self, effect: e.PushHeld) -> None:
        cap, held, capacity = effect.full.cap, effect.full.held, effect.full.capacity
        waits_for = self._whom_it_waits_for()
        blocked = m.Blocked(
            first_seq=effect.first_seq, cap=cap, held=held, capacity=capacity, waits_for=waits_for
        )
        self._connections.to_producer(effect.producer, blocked)

    def _whom_it_waits_for(self) -> str:
        """As of not long ago: every producer asks at once when a cap is reached."""
        now = self._clock()
        if now > self._explained_at + EXPLAINED_FOR_SECONDS:
            self._explained_at, self._explained = now, self._core.waits_for(now)
        return self._explained

    def _recall(self, effect: e.PushRecalled) -> None:
        self._connections.to_producer(effect.producer, m.Resend(first_seq=effect.first_seq))

    def _let_go(self, effect: e.PayloadsToJournal) -> None:
        self.perform(self._core.payloads_durable(effect.entries, self._clock()))
        self.feedback.changed()

    def _answer(self, effect: _Answer, asked: Peer | None) -> None:
        """Answer on the connection that asked; on a newer one the push is sent and asked again."""
        if self._connections.producers.get(effect.producer) is asked:
            self._do(effect)

    def _tell_ranks(self, dp_ranks: Iterable[int], message: m.Message) -> None:
        """Tell these ranks, as far as they are connected, the same; encoded once."""
        frame = codec.encode(message)
        for dp_rank in dp_ranks:
            if (rank := self._connections.welcomed_rank(self._core.client_of(dp_rank))) is not None:
                rank.peer.write(frame)

    # -- steps on their way -----------------------------------------------------------------

    def _hand_out(self) -> None:
        """Hand micro-batches to the peers, for a slice of time."""
        until = self._clock() + DELIVERY_SLICE_SECONDS
        while self._deliveries:
            rank, step, groups, index = self._deliveries.popleft()
            if not self._connections.is_attached(rank):  # who has said hello since gets it anew
                continue
            for at in range(index, len(step.micro_batches[rank.dp_rank])):
                if at > index and at % LOOKED_AT_EVERY == 0 and self._clock() > until:
                    self._deliveries.appendleft((rank, step, groups, at))
                    break
                rank.peer.enqueue(partial(self._bulk, rank, step, groups, at))
            if self._deliveries and self._clock() > until:
                self._later(self._hand_out)
                return

    def _bulk(
        self, rank: RankConnection, step: OpenStep, groups: GroupTotals | None, index: int
    ) -> Bulk | None:
        """The frame of one micro-batch; None once the step is over, or planned again."""
        if self._core.step(step.number) is not step:
            return None
        parts = step.micro_batches[rank.dp_rank]
        if index == len(parts) - 1:
            now = self._clock()
            self._metrics.delivery_duration.observe(now - step.planned_at)
            self._chronicle.delivered(step.number, rank.dp_rank, now)
        try:
            attempt = step.attempt
            if not parts[index]:
                (sample,) = self._samples([_any_here(step)])
                return Bulk(filler(step.number, index, sample, attempt=attempt))
            numbers = None if groups is None else groups.numbers[rank.dp_rank][index]
            samples = self._samples(parts[index])
            frame = partial(micro_batch, step.number, index, samples, numbers, attempt=attempt)
            return self._shared(rank.peer, samples, frame) or Bulk(frame())
        except Exception as error:  # a payload cannot be read back, or a bug of ours
            self._failure.fail(error)
            return None

    def _shared(
        self, peer: Peer, samples: Sequence[Sample], frame: Callable[..., list[Buffer]]
    ) -> Bulk | None:
        """With what the peer can find in shared memory, if there is enough of that."""
        if SHARED_MEMORY not in peer.terms.capabilities:
            return None
        payloads = [sample.payload for sample in samples]
        if not are_in_memory(payloads):  # some lie in a payload store
            return None
        if (found := share(payloads, self._in_flight.left)) is None:
            return None
        self._in_flight.sent(peer, len(found.descriptors))
        return Bulk(frame(shared=found.shared), found.descriptors, without=lambda: Bulk(frame()))

    def _samples(self, entries: Iterable[Entry]) -> list[Sample]:
        """With their payloads in memory, but for those in payload stores.

        What the journal alone has is read back for this once.
        """
        return [
            self._read_back(entry) if isinstance(entry.sample.payload, InJournal) else entry.sample
            for entry in entries
        ]

    def _read_back(self, entry: Entry) -> Sample:
        return entry.sample._replace(payload=InMemory(self._barrier.fetch(entry.ticket)))

    # -- planning ---------------------------------------------------------------------------

    def _plan_here(self, wanted: e.PlanWanted | e.ReplanWanted) -> None:
        self._planned(wanted, self._planner.plan(wanted))

    def _planned(self, wanted: e.PlanWanted | e.ReplanWanted, found: Plan) -> None:
        now, generation = self._clock(), self._core.generation
        if isinstance(wanted, e.PlanWanted):
            decision = self._core.planned(wanted, found, now)
            self._chronicle.planned(wanted, decision.effects, now, generation)
            self.perform(decision)
            return
        log.info("step %d is planned again, dp_size %d", wanted.step.number, wanted.dp_size)
        decision = self._core.replanned(wanted, found, now)
        step = self._core.step(wanted.step.number)
        if step is not None and step is not wanted.step:
            self._chronicle.replanned(step, found, now, generation)
        self.perform(decision)

    # -- turns of the event loop ------------------------------------------------------------

    def _later(self, what: Callable[[*_T], None], *values: *_T) -> None:
        """Call in a later turn, behind what is ready by then."""
        asyncio.get_running_loop().call_later(0, self._run, what, *values)

    def _run(self, what: Callable[[*_T], None], *values: *_T) -> None:
        """Call for the event loop, while we are not closed."""
        if not self._closed:
            self._failure.guard(what, *values)

    # -- time -------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._core.next_deadline()
        if deadline is not None:
            delay = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._run, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.perform(self._core.tick(self._clock()))


def _any_here(step: OpenStep) -> Entry:
    """A sample of the step that lies in no payload store, if there is one."""
    here = (entry for entry in step.entries() if not isinstance(entry.sample.payload, Reference))
    return next(here, next(step.entries()))


def _log_given_up(effect: e.GroupGivenUp) -> None:
    in_stores = effect.cap.cap == STORES_CAP
    log.warning(
        "group %s was given up with its %d samples: beginnings of groups fill the buffer at its %s "
        "cap (%d of %d) and none could become whole; raise %s, or have fewer groups under way",
        effect.group_id, effect.num_samples, effect.cap.cap, effect.cap.held, effect.cap.capacity,
        "--referenced-bytes" if in_stores else "--buffer-bytes, or use --journal-dir",
    )  # fmt: skip


def _log_unresolved(effect: e.SamplesUnresolved) -> None:
    log.warning(
        "DP rank %d cannot get samples of step %d from their payload store: %d are dropped, groups "
        "whole, sample %s first, and the step is planned again%s",
        effect.dp_rank, effect.step, effect.samples, effect.first,
        f" ({effect.why})" if effect.why else "",
    )  # fmt: skip


def _fail(peers: Iterable[Peer], error: DispatcherError) -> None:
    for peer in peers:
        peer.fail(error)


def _log_rewound(effect: e.Rewound) -> None:
    if effect.missing:
        log.warning(
            "a checkpoint taken after step %d was loaded: the %d steps trained after it cannot "
            "be given again (with --retain checkpoint they could); training goes on with the "
            "next one",
            effect.after, effect.missing,
        )  # fmt: skip
    else:
        log.info(
            "a checkpoint taken after step %d was loaded: %d steps of %d samples go back",
            effect.after, effect.steps, effect.samples,
        )  # fmt: skip


def _unreadable(ragged: Iterable[str]) -> ProtocolError:
    return ProtocolError(
        f"the samples have fields that are ragged or text ({', '.join(ragged)}), which this DP "
        "rank cannot read; install the dispatcher's release of rollout-dispatcher where it runs"
    )


def _log_schema(effect: e.SchemaDecided) -> None:
    fields = ", ".join(f"{field.name} {field}" for field in effect.schema.fields)
    log.info("samples have the fields %s (%s)", fields, effect.set_by)
    for lot in effect.dropped:
        log.warning(
            "%d samples with other fields are dropped, of which %s pushed the first: %s",
            lot.samples, f"producer {lot.first}" if lot.first else "an HTTP client", lot.difference,
        )  # fmt: skip
