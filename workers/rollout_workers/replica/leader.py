"""The DP leader of a model replica: a DP rank's client that its peers are told of."""

import threading
from typing import Any

from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.protocol import messages as m
from rollout_workers.rank.client import RankClient
from rollout_workers.rank.core import RankCore
from rollout_workers.rank.held_steps import HeldStep
from rollout_workers.replica.failures import told
from rollout_workers.replica.relay import Relay


class LeaderCore(RankCore):
    """A rank's core that passes on what it takes."""

    def __init__(self, relay: Relay, *where: Any, **options: Any) -> None:
        super().__init__(*where, **options)
        self._relay = relay

    def hello(self) -> m.HelloRank:
        """What the dispatcher is told; the peers hear of the first, and of a checkpoint."""
        hello = super().hello()
        self._hello = hello.model_copy(update={"token": None})
        if self.resuming:
            self._relay.put(self._hello)
        return hello

    def heard(self, message: m.Message, payload: memoryview, now: float) -> None:
        """Take a message, and pass it on if it counts."""
        before, resuming = self.welcome, self.resuming
        super().heard(message, payload, now)
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
            self._tell_beginning()
        super().demand(hungry=hungry)

    def take(self, held: HeldStep) -> None:
        """The training loop begins a step."""
        self._tell_beginning()
        super().take(held)

    def commit(self, step: int) -> None:
        """The training loop has applied a step."""
        super().commit(step)
        self._relay.forget(step)

    def finish(self, *, discard: bool) -> None:
        """The training loop has had enough; so have those of the peers, after the same step."""
        super().finish(discard=discard)
        if self._finish is not None:
            self._relay.put(self._finish)

    def _tell_beginning(self) -> None:
        """No checkpoint will be loaded any more: a peer that has loaded one would wait for ever."""
        if not self._begun:
            self._relay.put(m.Demand(taken=self.taken, hungry=True))


class Leader(RankClient):
    """A DP rank's client that hands out only what its peers have too.

    Takes what `RankClient` takes. Whatever ends it for good is told to the peers. Raises PeerLost
    where one of them is gone and more is asked for than all of them have.
    """

    def __init__(self, relay: Relay, endpoint: str, **options: Any) -> None:
        self._relay = relay
        try:
            super().__init__(endpoint, **options)
        except BaseException as error:
            relay.end(told(error))
            relay.join()
            raise

    def close(self) -> None:
        """Tell the peers, deliver what was committed, disconnect. Idempotent, bounded in time."""
        if self._process.is_here:
            self._relay.end(m.Bye(), self._core.taken)
        super().close()
        if self._process.is_here:
            self._relay.join()

    def _make_core(self, *where: Any, **options: Any) -> RankCore:
        self._core = LeaderCore(self._relay, *where, **options)
        return self._core

    def _make_condition(self) -> threading.Condition:
        return self._relay.changed

    def _ended(self, failure: DispatcherError | None) -> None:
        self._relay.end(m.Bye() if failure is None else told(failure), self._core.taken)

    def _here(self, held: HeldStep) -> int:
        return min(self._relay.told(held.header.step), super()._here(held))

    def _check_more_comes(self, step: int | None = None) -> None:
        begun = step is not None and step <= self._relay.last_step
        if self._relay.failure is not None and not begun:
            raise self._relay.failure
