"""The processes of a model replica: the DP leader relays what it receives to its peers."""

import atexit
import threading
from collections.abc import Mapping
from typing import Any

from rollout_dispatcher.errors import (
    CheckpointRefused,
    ConfigError,
    DispatcherError,
    PeerLost,
    StepContractError,
    StoreFailed,
)
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.client.link import error_message, restored
from rollout_workers.client.process import new_client_id
from rollout_workers.client.role import CLOSE_TIMEOUT_S
from rollout_workers.process_group import Place
from rollout_workers.rank.client import RankClient, StepClient
from rollout_workers.rank.core import RankCore
from rollout_workers.rank.fetcher import Fetcher
from rollout_workers.rank.held_steps import Fetch, HeldStep
from rollout_workers.replica.channel import (
    ROUNDS,
    Channel,
    Relay,
    peer_left,
    reason,
)


class LeaderCore(RankCore):
    """A rank's core that relays the messages that it accepts."""

    def __init__(self, relay: Relay, *where: Any, **options: Any) -> None:
        super().__init__(*where, **options)
        self._relay = relay

    def hello(self) -> m.HelloRank:
        """The hello to the dispatcher; the peers get the first, and that after a checkpoint."""
        hello = super().hello()
        self._hello = hello.model_copy(update={"token": None})
        if self.resuming:
            self._relay.put(self._hello)
        return hello

    def receive(self, message: m.Message, payload: memoryview, now: float) -> None:
        """Accept a message, and relay it if it counts."""
        before, resuming = self.welcome, self.resuming
        super().receive(message, payload, now)
        match message:
            case m.WelcomeRank():
                if before is None and not resuming:
                    self._relay.put(self._hello)
                if (before is None or resuming) and not self.resuming:
                    self._relay.put(message)
            case m.StepWithdrawn() if not resuming:
                self._relay.forget(message.step)
                self._relay.put(message)
            case m.StepHeader() | m.MicroBatch() | m.Release() | m.LastStep() | m.End() if (
                not resuming
            ):
                self._relay.put(message, payload)
            case m.Pong() if message.waits_for and not resuming:
                self._relay.put(message)

    def resume(self, position: m.CheckpointPosition) -> None:
        """The trainer has loaded a checkpoint."""
        if self._resume == position:
            return
        super().resume(position)
        self._relay.forget_all()

    def demand(self, *, hungry: bool) -> None:
        """The training loop begins, or ceases, to wait for a step."""
        if hungry:
            self._relay_beginning()
        super().demand(hungry=hungry)

    def take(self, held: HeldStep) -> None:
        """The training loop begins a step."""
        self._relay_beginning()
        super().take(held)

    def commit(self, step: int) -> None:
        """The training loop has applied a step."""
        super().commit(step)
        self._relay.forget(step)

    def finish(self, *, discard: bool) -> None:
        """The training loop ends the run; those of the peers do so after the same step."""
        super().finish(discard=discard)
        if self._finish is not None:
            self._relay.put(self._finish)

    def _relay_beginning(self) -> None:
        """No checkpoint can be loaded any more: a peer that has loaded one would wait for ever."""
        if not self._begun:
            self._relay.put(m.Demand(taken=self.taken, hungry=True))


class Leader(RankClient):
    """A DP rank's client that hands out only micro-batches that its peers have too.

    Takes the arguments of `RankClient`. The peers get the error that ends it for good. Raises
    PeerLost where one of them is gone and the loop asks for more than all of them have.
    """

    def __init__(self, relay: Relay, endpoint: str, **options: Any) -> None:
        self._relay = relay
        try:
            super().__init__(endpoint, **options)
        except BaseException as error:
            relay.end(error_message(error))
            relay.join()
            raise

    def _leave(self, *, goodbye: bool) -> None:
        """End the peers, deliver commits, disconnect. Idempotent, bounded in time."""
        if self._process.is_here:
            self._relay.end(m.Bye(), self._core.taken)
        super()._leave(goodbye=goodbye)
        if self._process.is_here:
            self._relay.join()

    def _make_core(self, *where: Any, **options: Any) -> RankCore:
        self._core = LeaderCore(self._relay, *where, **options)
        return self._core

    def _make_condition(self) -> threading.Condition:
        return self._relay.changed

    def _ended(self, failure: DispatcherError | None) -> None:
        self._relay.end(m.Bye() if failure is None else error_message(failure), self._core.taken)

    def _here(self, held: HeldStep) -> int:
        return min(self._relay.num_sent(held.header.step), super()._here(held))

    def _check_more_comes(self, step: int | None = None) -> None:
        begun = step is not None and step <= self._relay.last_step
        if self._relay.failure is not None and not begun:
            raise self._relay.failure


class FollowerCore(RankCore):
    """A rank's core that receives the leader's messages, and sends none.

    Every process loads a checkpoint, in any order: messages that the leader relays after it has
    loaded one wait here until this process has loaded the same.
    """

    def __init__(self, place: Place, training: Mapping[str, str]) -> None:
        super().__init__(new_client_id(), place.dp_rank, place.dp_size, None, 0, training=training)
        self._leader_loaded: m.CheckpointPosition | None = None
        self._leader_begun = False
        self._leader_finish: m.Finish | None = None
        self._kept: list[tuple[m.Message, memoryview]] = []

    def receive(self, message: m.Message, payload: memoryview, now: float) -> None:
        """Accept a message that the leader has accepted.

        Raises CheckpointRefused or ConfigError where they do not agree.
        """
        match message:
            case m.HelloRank():
                self._check_training(message.training)
                self._leader_loaded = message.resume
                self._check_agreement()
            case m.Demand():
                self._leader_begun = True
                self._check_agreement()
            case m.Finish():
                self._leader_finish = message
                self._check_finish()
            case _ if self._resume is None and self._leader_loaded is not None:
                self._kept.append((message, payload))
            case _:
                super().receive(message, payload, now)

    def resume(self, position: m.CheckpointPosition) -> None:
        """The trainer has loaded a checkpoint here."""
        super().resume(position)
        self._check_agreement()
        self.hello()  # as the leader does
        kept, self._kept = self._kept, []
        for message, payload in kept:
            super().receive(message, payload, 0.0)

    def demand(self, *, hungry: bool) -> None:
        """The training loop waits for a step, or ceases to."""
        super().demand(hungry=hungry)
        if hungry:
            self._check_agreement()

    def finish(self, *, discard: bool) -> None:
        """The training loop ends the run here."""
        super().finish(discard=discard)
        self._check_finish()

    def _check_finish(self) -> None:
        """Raise StepContractError where the leader has finished after another step."""
        mine, leaders = self._finish, self._leader_finish
        if mine is not None and leaders is not None and mine != leaders:
            raise StepContractError(
                f"this process finished the run after step {mine.step} with discard={mine.discard},"
                f" and the DP leader of its model replica after step {leaders.step} with discard="
                f"{leaders.discard}; call stream.finish() on every rank after the same step, with "
                "the same arguments"
            )

    def missed(self, fetch: Fetch, missing: dict[str, str]) -> None:
        """Raise StoreFailed: the leader has found them, and the step may have begun."""
        sample_id, why = next(iter(missing.items()))
        raise StoreFailed(
            fetch.references[0].stored.store,
            f"it has samples of step {fetch.held.header.step} for the DP leader of this process's "
            f"model replica, and not for this process, {sample_id} for one: {why}",
        )

    def _check_training(self, leaders: Mapping[str, str]) -> None:
        """Raise ConfigError where this process trains otherwise than the leader."""
        for name in sorted(leaders.keys() | self._training.keys()):
            mine, theirs = (of.get(name, "not given") for of in (self._training, leaders))
            if mine != theirs:
                raise ConfigError(
                    f"{name} is {mine} in this process, and {theirs} in the DP leader of its model "
                    "replica; make the stream with the same options on every rank of a mesh"
                )

    def _check_agreement(self) -> None:
        """Raise CheckpointRefused where one has loaded what the other has not, and will not."""
        mine, leaders = self._resume, self._leader_loaded
        if mine == leaders or (mine is None and not self._begun):
            return
        if leaders is None and not self._leader_begun:
            return
        raise CheckpointRefused(
            f"this process has loaded {_shown(mine)}, and the DP leader of its model replica "
            f"{_shown(leaders)}; call load_state_dict with the same state on every rank, before "
            "its first step"
        )

    @property
    def reports_times(self) -> bool:
        """The leader's times stand for the whole replica's."""
        return False

    def _say(self, message: m.Message) -> None:
        """Nothing: the leader sends for all."""


class Follower(StepClient):
    """A DP rank's client in a process that is not the DP leader: it receives from that.

    memory: gives the memory for payloads of micro-batches.

    Raises the leader's error where that could not join, or PeerLost.
    """

    def __init__(
        self,
        channel: Channel,
        place: Place,
        memory: Memory,
        *,
        training: Mapping[str, str],
    ) -> None:
        core, changed = FollowerCore(place, training), threading.Condition()
        super().__init__(core, changed)
        self._channel, self._memory, self._num_bytes = channel, memory, 0
        self._fetcher = Fetcher(core, changed, memory, spoken=self._wake, failed=self._fail)
        #: Why nothing more comes, once the leader or a peer has left, and the last step that all
        #: have begun by then.
        self._lost: PeerLost | None = None
        self._last_step = -1
        self._thread = threading.Thread(target=self._run, name="dispatcher-follower", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._await_welcome()

    def close(self) -> None:
        """Leave at the leader's next Ping, and end; bounded in time."""
        if not self._process.is_here:
            return
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
        atexit.unregister(self.close)

    def _connections(self) -> tuple[int, int]:
        return self._num_bytes, 0

    def _wake(self) -> None:
        """It sends nothing; but the training loop may have made room to fetch more."""
        with self._condition:
            self._fetcher.start_due()

    def _check_more_comes(self, step: int | None = None) -> None:
        begun = step is not None and step <= self._last_step
        if self._lost is not None and not begun:
            raise self._lost

    # -- in the thread

    def _run(self) -> None:
        failure: DispatcherError | None = None
        try:
            while self._receive():
                pass
        except DispatcherError as error:
            failure = error
        except Exception as error:
            failure = PeerLost(
                f"the DP leader of this model replica, rank {self._channel.ranks[0]}, is gone, or "
                f"one of its other ranks {list(self._channel.ranks[1:])}: "
                f"{reason(error)}; look at what ended it, and start the trainer again"
            )
        self._channel.close()
        self._fetcher.stop()
        with self._condition:
            self._failure = self._failure or failure
            self._condition.notify_all()

    def _receive(self) -> bool:
        """Accept one message; whether another may come."""
        message, payload = self._channel.receive(self._memory)
        if isinstance(message, ROUNDS):
            return self._answer(message)
        with self._condition:
            self._num_bytes += payload.nbytes
            if not self._stopping:
                self._core.receive(message, payload, 0.0)
                self._fetcher.start_due()
                self._condition.notify_all()
        return True

    def _answer(self, message: m.Message) -> bool:
        left = self._channel.agree(self._core.taken if self._stopping else None)
        with self._condition:
            if isinstance(message, m.Error):
                self._failure = restored(message)
            elif left is not None:
                self._lost, self._last_step = peer_left(left.rank), left.step
            return left is None


def _shown(position: m.CheckpointPosition | None) -> str:
    return "no checkpoint" if position is None else f"one taken after step {position.step}"
