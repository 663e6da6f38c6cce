"""DP ranks on the sample plane: their hellos and reports become calls on the core."""

import logging
from collections.abc import Callable
from typing import Any

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import NOTHING, Decision
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.steps.rank_state import CheckpointPosition, RankHello, Unresolved
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.config.checks import check_padding, check_rank
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.connections.connections import Connections
from rollout_dispatcher.service.connections.peer import Peer
from rollout_dispatcher.service.connections.store_workers import StoreWorkers
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.step_trace import StepTrace

log = logging.getLogger(__name__)


class Ranks:
    """Handles the messages of DP ranks. perform: carries out a decision of the core."""

    def __init__(
        self,
        core: DispatcherCore,
        config: ServeConfig,
        connections: Connections,
        *,
        metrics: Metrics,
        step_trace: StepTrace,
        store_workers: StoreWorkers,
        perform: Callable[[Decision], None],
    ) -> None:
        self._core, self._config, self._connections = core, config, connections
        self._metrics, self._step_trace = metrics, step_trace
        self._store_workers, self._perform = store_workers, perform
        self._handlers: dict[type[m.Message], Callable[[int, Any, float], object]] = {
            m.Demand: self._demand,
            m.Prepared: self._prepared,
            m.Unresolved: self._unresolved,
            m.Commit: self._commit,
            m.PolicyVersion: self._policy_version,
            m.Finish: self._finish,
            m.CheckpointSaved: self._checkpoint_saved,
            m.StepTimes: self._step_times,
        }

    def on_hello(self, peer: Peer, message: m.HelloRank, now: float) -> None:
        """A rank introduces itself. Raises RankRefused for one that cannot train here."""
        check_padding(self._config, message.packed_length)
        check_rank(self._config, opens_stores=peer.opens_stores, max_split=message.max_split or 1)
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
            training={"layout": str(self._config.layout)} | message.training,
            finished=message.finished,
            discards=message.discard,
        )
        self._store_workers.gone(peer)  # after another hello it gets nothing before its welcome
        known = self._connections.rank_of(peer) is not None and self._core.generation
        decision = self._core.join(hello, now)
        if hello.generation is None:
            self._metrics.waiting_since.clear()
            if self._connections.rank_of(peer) is not None:  # it gives its own place up
                self._connections.detach(peer.client_id)
        self._connections.decided_hello(peer)
        self._perform(decision)
        if self._connections.rank_of(peer) is None:
            return  # it was refused
        self._store_workers.there(peer)
        if known != self._core.generation:  # else it has loaded a checkpoint
            log.info(
                "DP rank %d of %d joined generation %d",
                message.dp_rank, message.dp_size, self._core.generation,
                extra={"event": "rank-joined", "dp_rank": message.dp_rank, "peer": str(peer)},
            )  # fmt: skip
        self._metrics.packed_lengths[message.dp_rank] = message.packed_length or 0
        self._note_hunger(message.dp_rank, hungry=message.hungry, now=now)
        if message.policy_version is not None:
            first_step = message.policy_step or 0
            self._perform(self._core.set_policy_version(message.policy_version, now, first_step))

    def on_message(self, peer: Peer, message: m.Message, now: float) -> None:
        """A rank reports; void from a connection that has lost its place to a newer one."""
        if (rank := self._connections.rank_of(peer)) is None:
            return
        self._core.seen(rank.dp_rank, now)
        self._handlers[type(message)](rank.dp_rank, message, now)

    def _demand(self, dp_rank: int, message: m.Demand, now: float) -> None:
        self._note_hunger(dp_rank, hungry=message.hungry, now=now)
        self._perform(self._core.demand(dp_rank, message.taken, now, hungry=message.hungry))
        self._step_trace.taken(dp_rank, message.taken, now)

    def _prepared(self, dp_rank: int, message: m.Prepared, now: float) -> None:
        step, digest, attempt = message.step, message.digest, message.attempt
        self._perform(self._core.prepared(dp_rank, step, digest, now, attempt=attempt))

    def _unresolved(self, dp_rank: int, message: m.Unresolved, now: float) -> None:
        ids = tuple(message.sample_ids)
        unresolved = Unresolved(message.step, message.attempt, ids, message.why)
        self._perform(self._core.unresolved(dp_rank, unresolved, now))

    def _commit(self, dp_rank: int, message: m.Commit, now: float) -> None:
        self._step_trace.rank_commits(dp_rank, message.step, now)
        self._perform(self._core.commit(dp_rank, message.step, now))
        for times in message.times or ():
            self._pass_times(dp_rank, message.step, times)

    def _policy_version(self, _dp_rank: int, message: m.PolicyVersion, now: float) -> None:
        version, first_step = message.policy_version, message.first_step
        self._perform(self._core.set_policy_version(version, now, first_step))

    def _finish(self, dp_rank: int, message: m.Finish, now: float) -> None:
        self._metrics.waiting_since.pop(dp_rank, None)
        self._perform(self._core.finish(dp_rank, message.step, now, discard=message.discard))

    def _checkpoint_saved(self, dp_rank: int, message: m.CheckpointSaved, _now: float) -> None:
        self._perform(self._core.checkpoint_saved(dp_rank, message.step))

    def _step_times(self, dp_rank: int, message: m.StepTimes, _now: float) -> None:
        self._pass_times(dp_rank, message.step, message)

    def _pass_times(self, dp_rank: int, step: int, spent: m.PassTimes) -> None:
        times = RankTimes(step, spent.cost_key, spent.busy_s, spent.collective_s, spent.why)
        self._step_trace.measured(dp_rank, times)
        if (decision := self._core.step_times(dp_rank, times)) is not NOTHING:
            self._perform(decision)

    def _note_hunger(self, dp_rank: int, *, hungry: bool, now: float) -> None:
        waiting_since = self._metrics.waiting_since
        if hungry:
            waiting_since.setdefault(dp_rank, now)  # a repeated Demand is the same wait
        elif (since := waiting_since.pop(dp_rank, None)) is not None:
            self._metrics.rank_wait_duration.observe(now - since)
            self._step_trace.waited(dp_rank, since, now - since)


def _position(resume: m.CheckpointPosition | None) -> CheckpointPosition | None:
    if resume is None:
        return None
    return CheckpointPosition(resume.run_id, resume.step, resume.allow_lost_steps)
