"""Performs what the core decided: frames to peers, plans in a worker thread, the next deadline.

Effects are carried out in the core's order, behind the gate if anybody outside hears of them. A
micro-batch's frame is built only when its peer has room for it. A large window is planned in a
worker thread, so that it does not keep connections waiting; a planner that fails is our own
bug, and stops the service rather than stall it unseen.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial, singledispatchmethod

from dispatcher.balance.planner import plan
from dispatcher.core import events as e
from dispatcher.core.buffer import Entry
from dispatcher.core.dispatch import Dispatch
from dispatcher.core.step import OpenStep
from dispatcher.errors import JournalError
from dispatcher.plan import Oversize, PlanConfig
from dispatcher.sample import Sample
from dispatcher.service.gate import Gate
from dispatcher.service.metrics import Metrics
from dispatcher.service.peer import Peer
from dispatcher.service.roster import Roster
from dispatcher.wire import messages as m
from dispatcher.wire.assemble import filler, micro_batch, step_header
from dispatcher.wire.outbox import Buffer

log = logging.getLogger(__name__)

#: How long micro-batches are handed out before others get their turn on the event loop.
DELIVERY_SLICE_SECONDS = 0.005
#: A window of up to so many samples is planned on the event loop: that takes a millisecond or two,
#: less than a slice of deliveries, and the thread would compete with the loop for the interpreter.
PLANNED_HERE_SAMPLES = 512


class Performer:
    """Hands for the core."""

    def __init__(
        self,
        core: Dispatch,
        plan_config: PlanConfig,
        roster: Roster,
        gate: Gate,
        *,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._gate = gate
        self._core = core
        self._plan_config = plan_config
        self._roster = roster
        self._metrics = metrics
        self._clock = clock
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._planning: set[asyncio.Task[None]] = set()
        self._headers: dict[int, tuple[str, bytes]] = {}
        self._deliveries: deque[tuple[Peer, OpenStep, e.Deliver]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        #: Fails when something of ours broke; never gets a result otherwise.
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def perform(self, effects: Iterable[e.Effect]) -> None:
        """Carry out what the core decided; then set the clock for what is due next."""
        self._gate.note(self._core.take_facts(), self._core.totals.as_json)
        for effect in effects:
            if isinstance(effect, e.PlanWanted | e.ReplanWanted | e.StepPlanned):
                self._do(effect)  # nobody outside hears of these
            elif isinstance(effect, e.PushAnswered | e.PushHeld):
                asked = self._roster.producers.get(effect.producer)
                self._gate.after(partial(self._answer, effect, asked))
            else:
                self._gate.after(partial(self._do, effect))
        self._set_timer()

    def fail(self, error: BaseException) -> None:
        """Something of ours broke; the first such error is what the service ends with."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def close(self) -> None:
        """Let go of the thread, the timer and plans that nobody waits for."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._planning:
            task.cancel()
        self._planner.shutdown(wait=False, cancel_futures=True)
        self.failure.cancel()

    # -- one method an effect ---------------------------------------------------------------

    @singledispatchmethod
    def _do(self, effect: e.Effect) -> None:
        raise TypeError(f"no way to perform {effect!r}")

    @_do.register
    def _(self, effect: e.PushAnswered) -> None:
        answer = m.Pushed(
            first_seq=effect.first_seq,
            outcomes=list(map(str, _shortest(effect.outcomes))),
            errors={str(index): text for index, text in effect.errors.items()},
        )
        self._roster.to_producer(effect.producer, answer)

    @_do.register
    def _(self, effect: e.PushHeld) -> None:
        cap, held, capacity = effect.full.cap, effect.full.held, effect.full.capacity
        blocked = m.Blocked(first_seq=effect.first_seq, cap=cap, held=held, capacity=capacity)
        self._roster.to_producer(effect.producer, blocked)

    @_do.register
    def _(self, effect: e.PlanWanted | e.ReplanWanted) -> None:
        task = asyncio.get_running_loop().create_task(self._run_planner(effect))
        self._planning.add(task)
        task.add_done_callback(self._planner_done)

    @_do.register
    def _(self, effect: e.Deliver) -> None:
        peer = self._roster.rank(self._client_of(effect.dp_rank))
        step = self._core.ledger.steps.get(effect.step)
        if peer is None or step is None:
            return  # the rank is away: it gets the step when it comes back
        peer.write(self._header(step))
        if not self._deliveries:
            # A turn later: first every rank hears of the step, then they get their parts.
            asyncio.get_running_loop().call_later(0, self._deliver)
        self._deliveries.append((peer, step, effect))

    @_do.register
    def _(self, effect: e.Release) -> None:
        self._tell_ranks(effect.dp_ranks, m.Release(step=effect.step))

    @_do.register
    def _(self, effect: e.EndRanks) -> None:
        self._tell_ranks(effect.dp_ranks, m.End(reason=effect.reason))

    @_do.register
    def _(self, effect: e.FailRanks) -> None:
        for client_id in effect.client_ids:
            if (peer := self._roster.unseat(client_id)) is not None:
                peer.fail(effect.error)

    @_do.register
    def _(self, effect: e.StepPlanned) -> None:
        # Ranks wait for the step, nobody for its metrics.
        asyncio.get_running_loop().call_soon(self._metrics.step_planned, effect)

    @_do.register
    def _(self, effect: e.Redelivered) -> None:
        self._metrics.redeliveries.labels(effect.reason).inc()

    @_do.register
    def _(self, effect: e.StepCommitted) -> None:
        self._headers.pop(effect.step, None)
        log.debug("step %d committed after %.3f s", effect.step, effect.seconds)

    @_do.register
    def _(self, effect: e.Rewound) -> None:
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

    @_do.register
    def _(self, effect: e.Drained) -> None:
        log.info("%s: every step is committed", effect.reason)

    # -- inside -----------------------------------------------------------------------------

    def _answer(self, effect: e.PushAnswered | e.PushHeld, asked: Peer | None) -> None:
        """Answer on the connection that asked; on a newer one the push is sent and asked again."""
        if self._roster.producers.get(effect.producer) is asked:
            self._do(effect)

    def _deliver(self) -> None:
        """Hand micro-batches to the peers, for a slice of time."""
        until = self._clock() + DELIVERY_SLICE_SECONDS
        while self._deliveries:
            peer, step, effect = self._deliveries.popleft()
            for index in range(effect.first_micro_batch, len(step.micro_batches[effect.dp_rank])):
                peer.enqueue(partial(self._frame, step, effect.dp_rank, index))
            if self._deliveries and self._clock() > until:
                asyncio.get_running_loop().call_later(0, self._deliver)
                return

    def _tell_ranks(self, dp_ranks: Iterable[int], message: m.Message) -> None:
        """Tell these ranks, as far as they are connected, the same; encoded once."""
        frame = m.encode(message)
        for dp_rank in dp_ranks:
            if (peer := self._roster.rank(self._client_of(dp_rank))) is not None:
                peer.write(frame)

    def _client_of(self, dp_rank: int) -> str:
        standing = self._core.ledger.ranks.get(dp_rank)
        return standing.client_id if standing is not None else ""

    def _header(self, step: OpenStep) -> bytes:
        digest, header = self._headers.get(step.number, ("", b""))
        if digest != step.digest:
            count = len(step.micro_batches[0])
            header = step_header(step.number, step.digest, count, step.samples())
            self._headers[step.number] = step.digest, header
        return header

    def _frame(self, step: OpenStep, dp_rank: int, index: int) -> list[Buffer] | None:
        """The frame of one micro-batch; None once the step is over, or planned again."""
        if self._core.ledger.steps.get(step.number) is not step:
            return None
        parts = step.micro_batches[dp_rank]
        if index == len(parts) - 1:
            self._metrics.delivery_duration.observe(self._clock() - step.planned_at)
        try:
            if parts[index]:
                samples = [self._with_payload(entry) for entry in parts[index]]
                return micro_batch(step.number, index, samples)
            return filler(step.number, index, self._with_payload(next(step.entries())))
        except JournalError as error:  # a payload cannot be read back
            self.fail(error)
            return None

    def _with_payload(self, entry: Entry) -> Sample:
        """A sample of a step that was committed before has its payload in the journal alone."""
        if entry.sample.is_here:
            return entry.sample
        return entry.sample._replace(payload=memoryview(self._gate.fetch(entry.ticket)))

    async def _run_planner(self, wanted: e.PlanWanted | e.ReplanWanted) -> None:
        began = self._clock()
        config = replace(self._plan_config, dp_size=wanted.dp_size)
        if isinstance(wanted, e.ReplanWanted):
            # An earlier process may have planned it under a larger token budget.
            config = replace(config, oversize=Oversize.ALONE)
        if len(wanted.window) <= PLANNED_HERE_SAMPLES:
            found = plan(wanted.window, config, wanted.take)
        else:
            found = await asyncio.get_running_loop().run_in_executor(
                self._planner, plan, wanted.window, config, wanted.take
            )
        now = self._clock()
        self._metrics.plan_duration.observe(now - began)
        if isinstance(wanted, e.PlanWanted):
            self.perform(self._core.planned(wanted, found, now))
        else:
            log.info("step %d is planned again, dp_size %d", wanted.step.number, wanted.dp_size)
            self.perform(self._core.replanned(wanted, found, now))

    def _planner_done(self, task: asyncio.Task[None]) -> None:
        self._planning.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._core.next_deadline()
        if deadline is not None:
            delay = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.perform(self._core.tick(self._clock()))


def _shortest(outcomes: tuple[e.Outcome, ...]) -> tuple[e.Outcome, ...]:
    """How `Pushed` says these outcomes: one for all where they are all the same."""
    same = outcomes[:1]
    return same if outcomes == same * len(outcomes) else outcomes
