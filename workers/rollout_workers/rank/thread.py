"""The thread of a DP rank's client: it owns the socket, feeds the core, and reconnects.

Pings go out from here, so a training loop that computes or pauses for minutes is alive. The
thread is a daemon because an exiting interpreter joins all others before it runs any exit hook: a
stream that nobody closed would hang there. An exit hook closes it politely instead.
"""

import atexit
import logging
import threading
from time import monotonic

from rollout_dispatcher.errors import DispatcherError, DispatcherUnreachable, ProtocolError
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.client.connection import Connection, Waker, connect, take_leave
from rollout_workers.client.credentials import Credentials, hopeless
from rollout_workers.client.liveness import (
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    Backoff,
    Heartbeat,
)
from rollout_workers.client.own_process import OwnProcess
from rollout_workers.rank.core import RankCore

log = logging.getLogger(__name__)

#: Sample ids are at most 128 bytes: room for a hundred thousand samples a micro-batch. A payload
#: of 4 GiB is more than a packed micro-batch of any model holds in token tensors.
LIMITS = FrameLimits(header=16 * 1024 * 1024, payload=4 * 1024**3)


class RankThread:
    """Drives a `RankCore`, which it and its users touch only while they hold `changed`.

    failure: what ended the connection for good; the users raise it.
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
    ) -> None:
        self._endpoint, self._core, self._changed = endpoint, core, changed
        self._credentials, self._memory = credentials, memory
        self._backoff = Backoff(reconnect_timeout)
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="dispatcher-rank", daemon=True)
        self._process = OwnProcess("stream")
        self._welcomes = 0
        self.bytes_received = 0
        self.stopping = False
        self.failure: DispatcherError | None = None

    @property
    def reconnects(self) -> int:
        """Connections that were established after the first."""
        return max(self._welcomes - 1, 0)

    def start(self) -> None:
        """Begin to connect."""
        atexit.register(self.stop)
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at what the core has to say."""
        if self._thread.is_alive():
            self._waker.wake()

    def stop(self) -> None:
        """Deliver what is said, disconnect, and join; bounded by twice the close timeout."""
        if not self._process.is_here:  # the exit hook, in a forked child
            return
        with self._changed:
            if self.stopping:
                return
            self.stopping = True
            self._changed.notify_all()
        self._waker.wake()
        self._thread.join(2 * CLOSE_TIMEOUT_S)
        atexit.unregister(self.stop)
        if not self._thread.is_alive():
            self._waker.close()

    # -- in the thread

    def _run(self) -> None:
        failure: DispatcherError | None = None
        try:
            self._serve_until_over()
        except DispatcherError as error:
            failure = error
        except Exception as error:
            log.exception("the stream's thread failed")
            failure = ProtocolError(f"the stream's thread failed: {error!r}")
        with self._changed:
            self.failure = failure
            self._changed.notify_all()

    def _serve_until_over(self) -> None:
        """Connect, serve, and connect again, until stopped, finished or hopeless.

        A stop allows one more attempt after a loss, so that the last commit is heard.
        """
        while True:
            last_attempt = self.stopping
            try:
                self._serve()
                return
            except OSError as lost:
                if (refused := hopeless(lost, self._endpoint)) is not None:
                    raise refused from lost
                with self._changed:
                    self._core.disconnected()
                    if self._core.finished or (self.stopping and self._core.said_nothing):
                        return
                if last_attempt:
                    log.warning(
                        "closed without a connection to the dispatcher at %s (%s): it may not know "
                        "of the commit of step %d", self._endpoint, lost, self._core.committed,
                    )  # fmt: skip
                    return
                self._pause(lost)

    def _pause(self, lost: OSError) -> None:
        """Wait before the next attempt; raises DispatcherUnreachable when out of patience."""
        delay = self._backoff.failed(monotonic())
        if delay is None:
            raise DispatcherUnreachable(self._endpoint, self._backoff.timeout, lost) from lost
        log.warning(
            "no connection to the dispatcher at %s (%s); next attempt in %.1f s",
            self._endpoint,
            str(lost) or type(lost).__name__,
            delay,
        )
        with self._changed:
            self._changed.wait_for(lambda: self.stopping, timeout=delay)

    def _serve(self) -> None:
        """One connection, to its loss (OSError) or to our own goodbye."""
        self._core.token = self._credentials.token()
        tls = self._credentials.tls_for(self._endpoint)
        sock = connect(self._endpoint, CONNECT_TIMEOUT_S, tls)
        connection = Connection(sock, self._waker, LIMITS, self._memory)
        try:
            interval_s = self._introduce(connection)
            self._exchange(connection, Heartbeat(interval_s, monotonic()))
            take_leave(connection, monotonic() + CLOSE_TIMEOUT_S)
        finally:
            connection.close()

    def _introduce(self, connection: Connection) -> float:
        try:
            return self._handshake(connection)
        except ConnectionError as lost:
            raise self._credentials.doubted(lost, self._endpoint) from lost

    def _handshake(self, connection: Connection) -> float:
        """HELLO and welcome; returns the heartbeat interval in seconds."""
        with self._changed:
            connection.send([self._core.hello()])
        deadline = monotonic() + (CLOSE_TIMEOUT_S if self.stopping else HANDSHAKE_TIMEOUT_S)
        before = self._core.welcome
        while self._core.welcome is before:
            left = deadline - monotonic()
            if left <= 0 or (self.stopping and self._core.said_nothing):
                raise TimeoutError("the dispatcher did not answer the HELLO")
            self._receive(connection, left)
        self._welcomes += 1
        self._backoff.connected(monotonic())
        assert self._core.welcome is not None
        return self._core.welcome.heartbeat_interval_s

    def _exchange(self, connection: Connection, heartbeat: Heartbeat) -> None:
        """Send what the core says and feed it what arrives, until stopped."""
        while True:
            with self._changed:
                connection.send(self._core.outgoing())
                if self.stopping:
                    return
            now = monotonic()
            if heartbeat.ping_due(now):
                connection.send([m.Ping()])
            if self._receive(connection, heartbeat.wait(now)):
                heartbeat.heard()
            heartbeat.check(monotonic())

    def _receive(self, connection: Connection, timeout: float) -> bool:
        """Feed the core what arrives; returns whether any bytes did."""
        before = connection.bytes_received
        arrived = connection.poll(timeout)
        nbytes = connection.bytes_received - before
        with self._changed:
            self.bytes_received += nbytes
            for message, payload in arrived:
                self._core.handle(message, payload)
            if arrived:
                self._changed.notify_all()
        return nbytes > 0
