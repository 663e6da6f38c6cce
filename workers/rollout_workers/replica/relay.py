"""The relay: a thread of the DP leader that tells its peers what the leader hears, in order.

While there is nothing to tell it says so every second, so that no peer waits in a broadcast for
longer, and all of them then say whether they go on: whoever leaves is known to all within that time
and closes no connection that others still use. A process that dies closes its connections; whoever
notices closes its own, and so all are told.
"""

import threading
from collections import deque
from time import monotonic
from typing import NamedTuple

from rollout_dispatcher.errors import PeerLost
from rollout_dispatcher.protocol import messages as m
from rollout_workers.client.liveness import CLOSE_TIMEOUT_S
from rollout_workers.replica.channel import Channel
from rollout_workers.replica.failures import reason

#: Between two words to the peers, at most.
KEEP_ALIVE_S = 1.0


class Said(NamedTuple):
    """What is to be told, and how often the leader had forgotten what came before."""

    message: m.Message
    payload: memoryview | None = None
    epoch: int = 0


class Relay:
    """Tells the peers until told the last word; look at it while you hold `changed`.

    failure: why nothing is told any more, where that is a peer's doing. last_step: that all have
        begun, where one took its leave.
    """

    def __init__(self, channel: Channel) -> None:
        self.changed = threading.Condition()
        self.failure: PeerLost | None = None
        self.last_step = -1
        self._taken = -1
        self._channel = channel
        self._outbox: deque[Said] = deque()
        self._last: m.Message | None = None
        #: The attempt that the peers were told last, and how many micro-batches of it they have, by
        #: step: of steps that the leader has not committed.
        self._told: dict[int, tuple[int, int]] = {}
        self._epoch = 0
        self._thread = threading.Thread(target=self._run, name="dispatcher-relay", daemon=True)
        self._thread.start()

    def put(self, message: m.Message, payload: memoryview | None = None) -> None:
        """Tell this; hold `changed`. The payload stays as it is until `told` says so."""
        if isinstance(message, m.StepHeader) and message.attempt != self._attempt(message.step):
            self._told[message.step] = message.attempt, 0
        self._outbox.append(Said(message, payload, self._epoch))
        self.changed.notify_all()

    def told(self, step: int) -> int:
        """How many micro-batches of a step the peers have."""
        return self._told.get(step, (0, 0))[1]

    def _attempt(self, step: int) -> int:
        """The attempt at a step that the peers were told last, -1 for none."""
        return self._told.get(step, (-1, 0))[0]

    def forget(self, step: int) -> None:
        """The leader has committed a step, or it is withdrawn."""
        self._told.pop(step, None)

    def forget_all(self) -> None:
        """What was heard so far is void; steps of the same numbers may come again."""
        self._outbox.clear()
        self._told.clear()
        self._epoch += 1

    def end(self, last: m.Message, taken: int = -1) -> None:
        """Tell this after all that is queued, and no more. Only the first such word counts.

        taken: the last step that the leader has begun.
        """
        with self.changed:
            if self._last is None:
                self._last, self._taken = last, taken
            self.changed.notify_all()

    def join(self) -> None:
        """Wait until the last word is told, for a bounded time."""
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    # -- in the thread

    def _run(self) -> None:
        try:
            failure = self._serve()
        except Exception as error:
            failure = PeerLost(
                "a process that shares this DP rank's model replica is gone, one of the ranks "
                f"{list(self._channel.ranks[1:])}: {reason(error)}; look at what "
                "ended it, and start the trainer again"
            )
        self._channel.close()
        with self.changed:
            self.failure = failure
            self.changed.notify_all()

    def _serve(self) -> PeerLost | None:
        due = monotonic() + KEEP_ALIVE_S
        while True:
            said = self._next(due)
            self._channel.say(said.message, said.payload)
            if not isinstance(said.message, ROUNDS):
                self._note(said)
                continue
            is_last = not isinstance(said.message, m.Ping)
            left = self._channel.agree(self._taken if is_last else None)
            if is_last:
                return None
            if left is not None:
                self.last_step = left.step
                return peer_left(left.rank)
            due = monotonic() + KEEP_ALIVE_S

    def _next(self, due: float) -> Said:
        """What to tell now: a Ping when it is due, the last word when there is nothing else."""
        with self.changed:
            while (left := due - monotonic()) > 0:
                if self._outbox:
                    return self._outbox.popleft()
                if self._last is not None:
                    return Said(self._last)
                self.changed.wait(left)
        return Said(m.Ping())

    def _note(self, said: Said) -> None:
        """The peers have a micro-batch: the leader's training loop may have it too."""
        message = said.message
        if not isinstance(message, m.MicroBatch):
            return
        with self.changed:
            if said.epoch == self._epoch and message.attempt == self._attempt(message.step):
                self._told[message.step] = message.attempt, message.index + 1
                self.changed.notify_all()


#: After one of these all wait for each other, and say whether they go on.
ROUNDS = (m.Ping, m.Bye, m.Error)


def peer_left(rank: int) -> PeerLost:
    """The error for a peer that closed its stream while others go on."""
    return PeerLost(
        f"rank {rank}, which shares this DP rank's model replica, closed its stream while others "
        "go on; every rank of a mesh takes the same steps, and then closes"
    )
