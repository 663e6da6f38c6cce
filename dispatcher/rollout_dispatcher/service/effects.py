"""Performs the core's effects: frames to peers, plans, the next deadline.

Effects are performed in the core's order, behind the durability barrier if a peer sees them. From
the decision on that ranks fail their messages are ignored; their error is sent behind the barrier.
Effects for one generation are never sent to another. A failing planner is a bug, and stops the
service rather than stall it unseen.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVarTuple

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision
from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.hints import harmless
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Outcome
from rollout_dispatcher.service import reporter
from rollout_dispatcher.service.barrier import DurabilityBarrier
from rollout_dispatcher.service.completion import Failure
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.connections import welcomes
from rollout_dispatcher.service.connections.connections import Connections, RankConnection
from rollout_dispatcher.service.connections.peer import Peer
from rollout_dispatcher.service.connections.store_workers import StoreWorkers
from rollout_dispatcher.service.delivery.deliveries import Deliveries
from rollout_dispatcher.service.delivery.frames import Frames
from rollout_dispatcher.service.feedback import Feedback
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.planner import Planner
from rollout_dispatcher.service.reporter import DropsLog
from rollout_dispatcher.service.step_trace import StepTrace
from rollout_planner.types import Plan

log = logging.getLogger(__name__)

_T = TypeVarTuple("_T")

#: Effects that wait for no fact: no peer sees them, or nothing that a crash may undo. The last two
#: are performed in part; they put the rest behind the barrier themselves.
AT_ONCE = frozenset((
    e.PlanRequested, e.ReplanRequested, e.StepPlanned, e.StepMeasured, e.SamplesAccepted,
    e.WelcomeProducer, e.RefuseRank, e.WelcomeRank, e.FailRanks,
))  # fmt: skip
#: Effects that answer a push.
ANSWERS = (e.PushAnswered, e.PushBlocked, e.ResendRequested)
#: Effects that are for the DP ranks of one generation.
TO_RANKS = (e.Deliver, e.Release, e.WithdrawStep, e.LimitSteps, e.EndRanks)
#: Seconds for which the text on the next step's delay is reused.
EXPLAINED_FOR_SECONDS = 0.25


class EffectRunner:
    """Performs the decisions of one core."""

    def __init__(
        self,
        core: DispatcherCore,
        config: ServeConfig,
        connections: Connections,
        barrier: DurabilityBarrier,
        failure: Failure,
        *,
        metrics: Metrics,
        step_trace: StepTrace,
        store_workers: StoreWorkers,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._barrier, self._failure = barrier, failure
        self._core = core
        self._connections = connections
        self._metrics, self._step_trace = metrics, step_trace
        self._clock = clock
        self._planner = Planner(config.plan_config(), metrics.plan_duration.observe, clock)
        self._deliveries = Deliveries(
            core, connections, Frames(barrier, config.sample_length_multiple), failure,
            metrics=metrics, clock=clock, later=self._later, perform=self.perform,
        )  # fmt: skip
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at: float | None = None
        self._closed = False
        self._explained_at, self._explained = -math.inf, ""
        self.feedback = Feedback(core, connections, self._run)
        self.drops_log = DropsLog()
        self._ways: dict[type[e.Effect], Callable[[Any], None]] = {
            e.WelcomeProducer: self._welcome_producer,
            e.AcceptedUnknown: reporter.accepted_unknown,
            e.PushAnswered: self._send_outcomes,
            e.PushBlocked: self._send_blocked,
            e.ResendRequested: self._request_resend,
            e.SchemaDecided: self._send_schema,
            e.IdsRepeated: reporter.ids_repeated,
            e.SamplesAccepted: step_trace.accepted,
            e.SamplesDropped: self._report_dropped,
            e.PolicyReported: self._report_policy,
            e.PayloadsToJournal: self._spill,
            e.FreeRequested: store_workers.ask,
            e.SweepRequested: store_workers.ask,
            e.GroupEvicted: reporter.group_evicted,
            e.PlanRequested: self._ask,
            e.ReplanRequested: self._ask,
            e.WelcomeRank: self._attach_rank,
            e.RefuseRank: self._refuse_rank,
            e.FailRanks: self._fail_ranks,
            e.Deliver: self._deliveries.deliver,
            e.Release: self._release,
            e.WithdrawStep: self._withdraw,
            e.LimitSteps: self._limit_steps,
            e.SamplesUnresolved: reporter.unresolved,
            e.EndRanks: self._end,
            e.EndProducers: self._end_producers,
            e.StepPlanned: self._observe,
            e.Redelivered: self._redelivered,
            e.StepCommitted: self._committed,
            e.StepMeasured: reporter.step_measured,
            e.CostChanged: reporter.cost_changed,
            e.SpeedsChanged: reporter.speeds_changed,
            e.Rewound: reporter.rewound,
            e.StepsEvicted: reporter.evicted,
            e.Advised: self._advise,
            e.Drained: lambda effect: reporter.drained(effect, core.statistics()),
        }

    def configure(self, config: ServeConfig) -> None:
        """Use these settings from the next plan on."""
        self._config = config
        self._planner.configure(config.plan_config())

    def perform(self, decision: Decision) -> None:
        """Perform a decision of the core, and set the timer for its next deadline."""
        if self._closed:  # the barrier may still open for the journal's last batches
            return
        try:  # as `guard` does, which would be a call more for each effect
            if decision.facts:
                self._barrier.note(decision.facts, decision.totals)
            for effect in decision.effects:
                try:
                    kind = type(effect)
                    if kind in AT_ONCE or not self._barrier.is_shut:
                        self._ways[kind](effect)
                    else:
                        self._put_behind_barrier(effect)
                except Exception as error:
                    self._failure.fail(error)
            self._set_timer()
        except Exception as error:
            self._failure.fail(error)

    def _put_behind_barrier(self, effect: e.Effect) -> None:
        """Perform it once the barrier is open, if the connection or generation is still the same.

        A producer that has reconnected pushes again, and a new generation gets its own effects.
        """

        def addressee() -> object:
            if isinstance(effect, ANSWERS):
                return self._connections.producers.get(effect.producer)
            return self._core.generation if isinstance(effect, TO_RANKS) else None

        def perform(before: object) -> None:
            if addressee() == before:
                self._ways[type(effect)](effect)

        self._barrier.after(partial(perform, addressee()))

    def close(self) -> None:
        """Release the thread, the timer and pending plans; later decisions are ignored."""
        self._closed = True
        self.drops_log.check(math.inf)
        if self._timer is not None:
            self._timer.cancel()
        self.feedback.close()
        self._planner.close()

    # -- one method an effect ---------------------------------------------------------------

    def _ask(self, effect: e.PlanRequested | e.ReplanRequested) -> None:
        if self._planner.plans_here(effect):
            # In the next turn: frames that were written before, such as answers, are sent first.
            asyncio.get_running_loop().call_soon(self._run, self._plan_here, effect)
        else:
            self._planner.plan_in_thread(effect, partial(self._planned, effect), self._failure.fail)

    def _welcome_producer(self, effect: e.WelcomeProducer) -> None:
        if (peer := self._connections.producers.get(effect.producer)) is None:
            return
        core = self._core
        peer.send(
            welcomes.of_producer(
                self._config, effect, core.schema, core.run_id, opens_stores=peer.opens_stores
            )
        )
        self.feedback.welcome(peer)

    def _send_outcomes(self, effect: e.PushAnswered) -> None:
        accepted = effect.outcomes.count(Outcome.ACCEPTED)
        error = harmless(next(iter(effect.errors.values()), ""))
        self._connections.clients.answered(effect.producer, accepted, error, self._clock())
        self.feedback.answer(effect)

    def _send_schema(self, effect: e.SchemaDecided) -> None:
        reporter.schema_decided(effect)
        if (decided := self._core.schema) is None:
            return
        message = welcomes.schema_known(*decided)
        for peer in self._connections.producers.values():
            if peer.wants_feedback:
                peer.send(message)

    def _report_dropped(self, effect: e.SamplesDropped) -> None:
        self._step_trace.dropped(effect)
        self.drops_log.note(effect.dropped, self._clock())
        self.feedback.dropped(effect)

    def _report_policy(self, effect: e.PolicyReported) -> None:
        self._step_trace.policy_reported(effect)
        self.feedback.changed()

    def _attach_rank(self, effect: e.WelcomeRank) -> None:
        peer = self._connections.take_hello(effect.client_id)
        if peer.welcomed:  # it has loaded a checkpoint since its first hello on this connection
            peer.forget()
        else:
            self._metrics.connections.labels("rank").inc()
        attached = self._connections.attach(peer, effect.dp_rank)
        self._barrier.after(partial(self._welcome_rank, attached, effect))

    def _welcome_rank(self, rank: RankConnection, effect: e.WelcomeRank) -> None:
        # Effects that were decided before its hello and wait too are not for this connection.
        if not self._connections.is_attached(rank):
            return
        rank.peer.welcomed = True
        stores = rank.peer.opens_stores
        rank.peer.send(welcomes.of_rank(self._config, effect, opens_stores=stores))

    def _refuse_rank(self, effect: e.RefuseRank) -> None:
        self._connections.take_hello(effect.client_id).fail(effect.error)

    def _release(self, effect: e.Release) -> None:
        self._step_trace.released(effect.step)
        self._send_to_ranks(effect.dp_ranks, m.Release(step=effect.step))

    def _withdraw(self, effect: e.WithdrawStep) -> None:
        self._step_trace.withdrawn(effect.step)
        self._send_to_ranks(effect.dp_ranks, m.StepWithdrawn(step=effect.step))

    def _limit_steps(self, effect: e.LimitSteps) -> None:
        self._send_to_ranks(effect.dp_ranks, m.LastStep(step=effect.last))

    def _advise(self, effect: e.Advised) -> None:
        advice, producer = m.Advice(text=effect.text), effect.producer
        if producer is None:
            log.warning("%s", effect.text, extra={"event": "advice", "dp_rank": 0})
            self._send_to_ranks((0,), advice)
            return
        who = f"producer {producer}" if producer else "an HTTP client"
        log.warning("%s: %s", who, effect.text, extra={"event": "advice", "producer": producer})
        peer = self._connections.producers.get(producer)
        if peer is not None and peer.wants_feedback:
            peer.send(advice)

    def _fail_ranks(self, effect: e.FailRanks) -> None:
        """Ignore these ranks from now on, and send them the error behind the barrier."""
        for client_id in effect.client_ids:
            if (rank := self._connections.ranks.get(client_id)) is not None:
                self._metrics.waiting_since.pop(rank.dp_rank, None)
        detached = self._connections.detach(*effect.client_ids)
        self._barrier.after(partial(_fail, detached, effect.error))

    def _end(self, effect: e.EndRanks) -> None:
        for dp_rank in effect.dp_ranks:
            self._metrics.waiting_since.pop(dp_rank, None)
        self._send_to_ranks(effect.dp_ranks, m.End(reason=effect.reason))

    def _end_producers(self, effect: e.EndProducers) -> None:
        for peer in list(self._connections.producers.values()):
            peer.fail(effect.error)

    def _observe(self, effect: e.StepPlanned) -> None:
        # In a later turn: ranks wait for the step, and nothing waits for its metrics.
        self._later(self._metrics.step_planned, effect)
        self.feedback.changed()

    def _redelivered(self, effect: e.Redelivered) -> None:
        self._metrics.redeliveries.labels(effect.reason).inc()
        self._step_trace.redelivered(effect)

    def _committed(self, effect: e.StepCommitted) -> None:
        self._deliveries.forget(effect.step)
        self._step_trace.committed(effect.step)
        self.feedback.changed()
        log.debug("step %d committed after %.3f s", effect.step, effect.seconds)

    def _send_blocked(self, effect: e.PushBlocked) -> None:
        cap, held, capacity = effect.full.cap, effect.full.held, effect.full.capacity
        waits_for = self.explain_delay()
        blocked = m.Blocked(
            first_seq=effect.first_seq, cap=cap, held=held, capacity=capacity, waits_for=waits_for
        )
        self._connections.to_producer(effect.producer, blocked)

    def explain_delay(self) -> str:
        """Return a recent text: every producer asks at once when a cap is reached."""
        now = self._clock()
        if now > self._explained_at + EXPLAINED_FOR_SECONDS:
            self._explained_at, self._explained = now, self._core.waits_for(now)
        return self._explained

    def _request_resend(self, effect: e.ResendRequested) -> None:
        self._connections.to_producer(effect.producer, m.Resend(first_seq=effect.first_seq))

    def _spill(self, effect: e.PayloadsToJournal) -> None:
        self.perform(self._core.payloads_durable(effect.entries, self._clock()))
        self.feedback.changed()

    def _send_to_ranks(self, dp_ranks: Iterable[int], message: m.Message) -> None:
        """Send one message, encoded once, to those of the ranks that are connected."""
        frame = codec.encode(message)
        for dp_rank in dp_ranks:
            if (rank := self._connections.welcomed_rank(self._core.client_of(dp_rank))) is not None:
                rank.peer.write(frame)

    # -- planning ---------------------------------------------------------------------------

    def _plan_here(self, wanted: e.PlanRequested | e.ReplanRequested) -> None:
        self._planned(wanted, self._planner.plan(wanted))

    def _planned(self, wanted: e.PlanRequested | e.ReplanRequested, found: Plan) -> None:
        now, generation = self._clock(), self._core.generation
        if isinstance(wanted, e.PlanRequested):
            decision = self._core.planned(wanted, found, now)
            self._step_trace.planned(wanted, decision.effects, now, generation)
            self.perform(decision)
            return
        number = wanted.step.number
        fields = {"event": "step-replanned", "step": number}
        log.info("step %d is planned again, dp_size %d", number, wanted.dp_size, extra=fields)
        decision = self._core.replanned(wanted, found, now)
        step = self._core.step(wanted.step.number)
        if step is not None and step is not wanted.step:
            self._step_trace.replanned(step, found, now, generation)
        self.perform(decision)

    # -- turns of the event loop ------------------------------------------------------------

    def _later(self, what: Callable[[*_T], None], *values: *_T) -> None:
        """Call in a later turn, after the callbacks that are ready by then."""
        asyncio.get_running_loop().call_later(0, self._run, what, *values)

    def _run(self, what: Callable[[*_T], None], *values: *_T) -> None:
        """Call unless closed; an error of it ends the service."""
        if not self._closed:
            self._failure.guard(what, *values)

    # -- time -------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if (deadline := self._core.next_deadline()) == self._rings_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._rings_at = deadline
        if deadline is not None:
            delay = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._run, self._tick)

    def _tick(self) -> None:
        self._timer = self._rings_at = None
        self.perform(self._core.tick(self._clock()))


def _fail(peers: Iterable[Peer], error: DispatcherError) -> None:
    for peer in peers:
        peer.fail(error)
