"""The thread of a DP rank's client: it keeps the core connected while the training loop computes.

Pings go out from here, so a training loop that computes or pauses for minutes is alive. A stream
that nobody closed is closed politely by an exit hook.
"""

import atexit
import threading
from collections.abc import Callable

from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.protocol.sessions import Side
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.client.connector import Connector, Credentials
from rollout_workers.client.process import LoopThread, OwnProcess
from rollout_workers.client.role import CLOSE_TIMEOUT_S, Role
from rollout_workers.rank.core import RankCore
from rollout_workers.rank.fetcher import Fetcher
from rollout_workers.rank.shared_memory.gatherer import Gatherer
from rollout_workers.rank.shared_memory.incoming import SharedMemory

#: Sample ids are at most 128 bytes: room for a hundred thousand samples a micro-batch. A payload
#: of 4 GiB is more than a packed micro-batch of any model holds in token tensors.
LIMITS = FrameLimits(header=16 * 1024 * 1024, payload=4 * 1024**3)


class RankThread:
    """Drives a `RankCore`, which it and its users touch only while they hold `changed`.

    Begins to connect when made. over: no connection will come any more. failure: what ended it for
    good, if that was no goodbye and not the end of the stream; the users raise it. ended: is told
    the same, when it is set. mappings: payloads in shared memory that may be mapped at a time.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        core: RankCore,
        changed: threading.Condition,
        reconnect_timeout: float,
        *,
        credentials: Credentials,
        memory: Memory,
        mappings: int,
        ended: Callable[[DispatcherError | None], object],
    ) -> None:
        self._core, self._changed, self._ended = core, changed, ended
        self._process = OwnProcess("stream")
        self._woken = False
        self.stopping = self.over = False
        self.failure: DispatcherError | None = None
        incoming = SharedMemory(Gatherer(memory, mappings, LIMITS.payload))
        role = Role(
            core, Side.RANK, LIMITS, self._heard, guard=changed, memory=memory, incoming=incoming,
            name=f"DP rank {core.dp_rank}",
        )  # fmt: skip
        self._fetcher = Fetcher(core, changed, memory, spoken=self.wake, failed=self._fail)
        self._thread = LoopThread("dispatcher-rank")
        self._connector = Connector(
            self._thread.loop, endpoint, role, credentials, reconnect_timeout
        )
        atexit.register(self.stop)
        self._thread.finish(self._run())

    @property
    def bytes_received(self) -> int:
        """On all connections; hold `changed`."""
        return self._connector.bytes_received

    @property
    def reconnects(self) -> int:
        """Connections that were established after the first."""
        return max(self._connector.welcomes - 1, 0)

    def wake(self) -> None:
        """Have the thread look at what the core has to say; until it does one wake suffices."""
        if not self._woken:
            self._woken = True
            self._thread.call(self._pump)

    def ask(self) -> None:
        """Have the dispatcher say what the next step waits for, if it can be asked."""
        self._thread.call(self._connector.ping)

    def stop(self) -> None:
        """Deliver what is said, disconnect, and join; bounded by twice the close timeout."""
        if not self._process.is_here:  # the exit hook, in a forked child
            return
        with self._changed:
            if self.stopping:
                return
            self.stopping = True
            self._changed.notify_all()
        self._thread.call(self._connector.leave)
        self._thread.join(2 * CLOSE_TIMEOUT_S)
        atexit.unregister(self.stop)

    # -- in the thread

    def _heard(self) -> None:
        """Wake the training loop, unless it finds nothing new: that costs both threads much."""
        if self._core.take_news():
            self._changed.notify_all()
        self._fetcher.look()

    def _pump(self) -> None:
        self._woken = False
        with self._changed:
            self._fetcher.look()
        self._connector.pump()

    async def _run(self) -> None:
        failure = await self._connector.run()
        self._fetcher.stop()
        with self._changed:
            self.failure = self.failure or failure
            self.over = True
            self._ended(self.failure)
            self._changed.notify_all()

    # -- in any thread

    def _fail(self, error: DispatcherError) -> None:
        """It cannot go on, whatever the dispatcher says; hold `changed`."""
        self.failure = self.failure or error
        self._thread.call(self._connector.leave)
