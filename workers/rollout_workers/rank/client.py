"""A DP rank's client without torch: a thread that receives, and calls that wait for it.

`MicroBatchStream` is built on it; by itself it serves load generators and tests, which look at
micro-batches as numpy arrays.

The training loop and the receiving thread share one `RankCore` under one condition variable: every
change notifies, every wait is for a state, and the thread's end, for whatever reason, is such a
change. So no call waits for an event that can no longer come.
"""

import atexit
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Literal, NoReturn, TypeVar

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import ClientClosed, DispatcherError, StepTimeout
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits
from rollout_dispatcher.protocol.sessions import Side
from rollout_dispatcher.protocol.slices import Slicing
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.client.connector import Connector, Credentials
from rollout_workers.client.process import (
    Closing,
    LoopThread,
    OwnProcess,
    dies_of_exception,
    forbid_pickle,
    new_client_id,
    validated,
)
from rollout_workers.client.role import CLOSE_TIMEOUT_S, Role
from rollout_workers.rank.core import RankCore
from rollout_workers.rank.fetcher import Fetcher
from rollout_workers.rank.held_steps import HeldStep, Received
from rollout_workers.rank.memory_pool import MemoryPool

T = TypeVar("T")

#: Sample ids are at most 128 bytes: room for a hundred thousand samples a micro-batch. A payload
#: of 4 GiB is more than a packed micro-batch of any model holds in token tensors.
LIMITS = FrameLimits(header=16 * 1024 * 1024, payload=4 * 1024**3)
#: Before its time is up a wait asks the dispatcher what it is for: at most so many seconds before.
ASKS_BEFORE_S = 2.0


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """A snapshot of what a rank's client has done; times in seconds.

    step_wait_s: spent in `next()`. micro_batch_wait_s: spent waiting for micro-batches of steps
    that were released already.
    """

    steps_taken: int
    steps_committed: int
    micro_batches: int
    bytes_received: int
    reconnects: int
    step_wait_s: float
    micro_batch_wait_s: float


class RankStep:
    """One step as its training loop has it; iterate any number of times until `commit`."""

    def __init__(self, client: "StepClient", header: m.StepHeader) -> None:
        self._client = client
        self.header = header

    def __len__(self) -> int:
        return self.header.num_micro_batches

    def __iter__(self) -> Iterator[Received]:
        return map(self.micro_batch, range(len(self)))

    def micro_batch(self, index: int) -> Received:
        """Wait for one of its micro-batches; see `StepClient.micro_batch`."""
        return self._client.micro_batch(self.header.step, index)

    def has(self, index: int) -> bool:
        """Whether one of its micro-batches is here; raises StepContractError once committed."""
        return self._client.has(self.header.step, index)

    def commit(self, then: Callable[[], None] | None = None) -> None:
        """Queue the step's commit; see `StepClient.commit`."""
        self._client.commit(self.header.step, then)


class StepClient(Closing):
    """Steps and micro-batches that a thread receives, and the calls of the training loop.

    A subclass starts the thread, then waits for the welcome. The core and the thread's state below
    are touched only while `_condition` is held. _stopping: `close` was called.
    _failure: what ended it for good, if that was no goodbye; every call raises it.
    """

    def __init__(self, core: RankCore, condition: threading.Condition) -> None:
        self._core, self._condition = core, condition
        self._stopping = False
        self._failure: DispatcherError | None = None
        self._process = OwnProcess("stream")
        self._steps_taken = self._steps_committed = self._micro_batches = 0
        self._step_wait_s = self._micro_batch_wait_s = 0.0

    def _await_welcome(self) -> None:
        """Raises what ended it before."""
        try:
            self.welcome = self._wait(lambda: self._core.welcome)
        except BaseException:
            self.close()
            raise
        self.run_id = self.welcome.run_id
        self.generation = self.welcome.generation
        self.layout = self.welcome.layout
        self.sample_length_multiple = self.welcome.sample_length_multiple or 1

    def __reduce__(self) -> NoReturn:
        forbid_pickle("stream")

    @property
    def _changed(self) -> threading.Condition:
        """What guards the core; in a forked child it may be held by a thread that is not there."""
        self._process.check()
        return self._condition

    @property
    def end_reason(self) -> EndReason | None:
        """Why the stream has ended; None while it has not."""
        return self._core.end_reason

    def next_step(self, timeout: float | None = None) -> RankStep | None:
        """Wait for the next released step; None when the stream has ended.

        Raises StepTimeout after `timeout` seconds, StepContractError when too many steps are
        uncommitted, or the error that ended the connection for good.
        """
        began = monotonic()
        try:
            with self._changed:
                try:
                    held = self._wait(self._next_or_end, timeout)
                finally:
                    self._step_wait_s += monotonic() - began
                    self._core.demand(hungry=False)
                if not isinstance(held, HeldStep):
                    return None
                self._core.take(held)
                self._steps_taken += 1
        finally:
            self._wake()
        return RankStep(self, held.header)

    def micro_batch(self, step: int, index: int) -> Received:
        """Wait for one micro-batch of a taken step.

        Raises StepContractError when the step is committed, or the error that ended the
        connection for good.
        """
        with self._changed:
            self._check()
            found = self._received(step, index) or self._await(step, index)
            self._micro_batches += 1
            self._core.hand_out(step)
            return found

    def has(self, step: int, index: int) -> bool:
        """Whether `micro_batch` would return at once; raises StepContractError once committed."""
        with self._changed:
            return self._received(step, index) is not None

    def commit(self, step: int, then: Callable[[], None] | None = None) -> None:
        """Queue the commit of the oldest taken step and return.

        then: called once it is queued; times that it reports leave with the commit.

        Raises StepContractError, which names the step that is due, when it is another one.
        """
        try:
            with self._changed:
                self._check()
                self._core.commit(step)
                self._steps_committed += 1
                if then is not None:
                    then()
        finally:
            self._wake()

    def watch_collectives(self, count: Callable[[], int]) -> None:
        """Heartbeats report how many collectives of all DP ranks were begun, to find hung ranks."""
        with self._changed:
            self._core.count_collectives = count

    def finish(self, *, discard: bool = False, timeout: float | None = None) -> None:
        """Finish the run, as every rank has to after the same step; returns once all have.

        At once where the stream has ended anyway. Raises StepContractError where ranks differ, or
        a step is begun and not committed; PeerLost, StepTimeout as `next_step` does.
        """
        try:
            with self._changed:
                self._check()
                self._core.finish(discard=discard)
        finally:
            self._wake()
        what = "end of the run"
        self._wait(lambda: True if self._core.exhausted else None, timeout, what)

    @property
    def reports_times(self) -> bool:
        """Whether this process reports its times: of a model replica the leader does."""
        return True

    def report_times(self, times: m.StepTimes) -> None:
        """Report the times of a pass over a committed step; dropped without a connection.

        They leave with the next message, as no rank waits for them.
        """
        with self._changed:
            self._core.report_times(times)

    def set_policy_version(self, version: int) -> None:
        """Report the version of the weights that the next step to begin trains with.

        Raises ConfigError below 0, StepContractError for one below the last; see
        `MicroBatchStream.set_policy_version`.
        """
        with self._changed:
            self._check()
            validated(lambda: self._core.set_policy_version(version))
        self._wake()

    @property
    def reports_no_version(self) -> bool:
        """Whether steps were committed and no policy version was reported, which is asked for."""
        if self.welcome.max_staleness is None:
            return False
        with self._changed:
            return self._core.reports_no_version

    @property
    def position(self) -> int:
        """The last step in the trainer's weights, by the commits and checkpoints so far; or -1."""
        with self._changed:
            return self._core.position

    def resume(self, position: m.CheckpointPosition) -> None:
        """The trainer has loaded a checkpoint: go on after it, as every rank has to say.

        Returns once the dispatcher has agreed; `self.position` is later than asked for if steps
        cannot be delivered again. Raises StepContractError after the first `next_step`, or
        CheckpointRefused; the client is over then.
        """
        with self._changed:
            self._check()
            self._core.resume(position)
        self._wake()
        self._wait(lambda: None if self._core.resuming else True)

    def checkpoint_saved(self, step: int) -> None:
        """A checkpoint taken after that step is durable; DP rank 0's word counts."""
        with self._changed:
            self._check()
            self._core.checkpoint_saved(step)
        self._wake()

    def statistics(self) -> RankStatistics:
        """A snapshot; cheap, and safe from any thread."""
        with self._changed:
            bytes_received, reconnects = self._connections()
            return RankStatistics(
                steps_taken=self._steps_taken,
                steps_committed=self._steps_committed,
                micro_batches=self._micro_batches,
                bytes_received=bytes_received,
                reconnects=reconnects,
                step_wait_s=self._step_wait_s,
                micro_batch_wait_s=self._micro_batch_wait_s,
            )

    # -- done by the thread for the calls

    @abstractmethod
    def _connections(self) -> tuple[int, int]:
        """Bytes received on all connections, and how many were established after the first."""

    @abstractmethod
    def _wake(self) -> None:
        """The core may have messages to send."""

    def _ask(self) -> None:
        """Ask the dispatcher for the reason why the next step waits, if it is connected."""

    def _fail(self, error: DispatcherError) -> None:
        """The client cannot go on; hold the condition."""
        self._failure = self._failure or error

    # -- waiting

    def _wait(
        self, found: Callable[[], T | None], timeout: float | None = None, what: str = "step"
    ) -> T:
        """The first value of `found` that is not None; raises the error that ended the thread."""
        deadline = asks_at = None
        if timeout is not None:
            deadline = monotonic() + timeout
            asks_at = deadline - min(timeout / 2, ASKS_BEFORE_S)
        with self._changed:
            while True:
                self._check()
                value = found()
                if value is not None:
                    return value
                self._check_more_comes()
                if timeout is None or deadline is None:
                    self._changed.wait()
                    continue
                now = monotonic()
                if now >= deadline:
                    raise StepTimeout(timeout, self._core.waits_for, what)
                if asks_at is not None and now >= asks_at:
                    asks_at = None
                    self._ask()
                self._changed.wait((asks_at or deadline) - now)

    def _next_or_end(self) -> HeldStep | Literal[True] | None:
        if self._core.exhausted:
            return True
        self._check_more_comes(self._core.following)
        held = self._core.ready()
        if held is None and not self._core.hungry:
            self._core.demand(hungry=True)
            self._wake()
        return held

    def _await(self, step: int, index: int) -> Received:
        """A micro-batch that is not here yet."""
        began = monotonic()
        try:
            return self._wait(lambda: self._received(step, index))
        finally:
            self._micro_batch_wait_s += monotonic() - began

    def _received(self, step: int, index: int) -> Received | None:
        held = self._core.begin(step)
        return held.micro_batches[index] if index < self._here(held) else None

    def _here(self, held: HeldStep) -> int:
        """How many micro-batches of a step may be handed out."""
        return held.num_complete

    def _check(self) -> None:
        """Raise the error that ended this client, in every call."""
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise ClientClosed("the stream is closed")

    def _check_more_comes(self, step: int | None = None) -> None:
        """Raise the reason why nothing more comes, or why this step may not begin."""


class RankClient(StepClient):
    """Connects when made, and keeps at it until closed; a context manager.

    Pings go out from its thread, so a training loop that computes or pauses for minutes is alive.
    One that nobody closed is closed politely by an exit hook.

    generation: None asks for a new generation, which only DP rank 0 may do.
    prefetch_steps: steps to receive ahead of the training loop.
    reconnect_timeout: seconds to keep trying when the dispatcher cannot be reached; then, as for
        every other failure, each call raises the error.
    credentials: what to show and trust; default: what the environment says.
    packed_length: tokens that micro-batches are padded to, for the dispatcher to check and count.
    max_split: DP ranks that it can train a micro-batch with together, itself counted.
    slicing: what it is sent of their samples then; None: the whole of them.
    training: what shapes gradients, by name; the dispatcher refuses DP ranks that differ in it.
    memory: gives what a micro-batch's payload is received into; default: a pool of its own.

    Raises ConfigError, DispatcherUnreachable, Unauthorized, TlsFailed, RankRefused,
    GenerationFenced.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        dp_rank: int,
        dp_size: int,
        generation: int | None = None,
        prefetch_steps: int = 1,
        reconnect_timeout: float = 300.0,
        credentials: Credentials | None = None,
        packed_length: int | None = None,
        max_split: int = 1,
        slicing: Slicing | None = None,
        training: Mapping[str, str] | None = None,
        memory: Memory | None = None,
    ) -> None:
        address = Endpoint.parse(endpoint)
        shown = Credentials.from_environment() if credentials is None else credentials
        core = self._make_core(
            new_client_id(), dp_rank, dp_size, generation, prefetch_steps,
            packed_length=packed_length, max_split=max_split, slicing=slicing, training=training,
        )  # fmt: skip
        validated(core.hello)
        memory = memory or MemoryPool()
        super().__init__(core, self._make_condition())
        self._woken = self._over = False
        role = Role(
            core, Side.RANK, LIMITS, self._on_received, guard=self._condition, memory=memory,
            name=f"DP rank {dp_rank}",
        )  # fmt: skip
        self._fetcher = Fetcher(core, self._condition, memory, spoken=self._wake, failed=self._fail)
        self._thread = LoopThread("dispatcher-rank")
        self._connector = Connector(self._thread.loop, address, role, shown, reconnect_timeout)
        atexit.register(self._exit)
        self._thread.finish(self._run())
        self._await_welcome()

    def close(self) -> None:
        """Deliver what was committed, say goodbye, end the thread. Idempotent, bounded in time."""
        self._leave(goodbye=True)

    def abandon(self) -> None:
        """As `close`, without a goodbye: the dispatcher counts the connection as lost."""
        self._leave(goodbye=False)

    def _exit(self) -> None:
        """The interpreter exits."""
        self._leave(goodbye=not dies_of_exception())

    def _leave(self, *, goodbye: bool) -> None:
        if not self._process.is_here:  # the exit hook, in a forked child
            return
        with self._condition:
            if self._stopping:
                return
            self._stopping = True
            goodbye = goodbye or self._core.finished
            self._condition.notify_all()
        self._thread.call(partial(self._connector.leave, goodbye=goodbye))
        self._thread.join(2 * CLOSE_TIMEOUT_S)
        atexit.unregister(self._exit)

    # -- overridden by the leader of a replica

    def _make_core(self, *where: Any, **options: Any) -> RankCore:
        return RankCore(*where, **options)

    def _make_condition(self) -> threading.Condition:
        return threading.Condition()

    def _ended(self, failure: DispatcherError | None) -> None:
        """The thread ends, for good; called in it, with the condition held."""

    # -- mechanism

    def _check(self) -> None:
        super()._check()
        if self._over and not self._core.finished:
            raise ClientClosed(
                "the stream had ended and its dispatcher was gone before it heard of the "
                "checkpoint; make a new stream"
            )

    def _connections(self) -> tuple[int, int]:
        return self._connector.bytes_received, max(self._connector.welcomes - 1, 0)

    def _wake(self) -> None:
        """Have the thread send the core's messages; until it does one wake suffices."""
        if not self._woken:
            self._woken = True
            self._thread.call(self._pump)

    def _ask(self) -> None:
        self._thread.call(self._connector.ping)

    def _fail(self, error: DispatcherError) -> None:
        super()._fail(error)
        self._thread.call(self._connector.leave)

    # -- in the thread

    def _on_received(self) -> None:
        """Wake the training loop if it may go on: a vain wake costs both threads much."""
        if self._core.take_news():
            self._condition.notify_all()
        self._fetcher.start_due()

    def _pump(self) -> None:
        self._woken = False
        with self._condition:
            self._fetcher.start_due()
        self._connector.pump()

    async def _run(self) -> None:
        failure = await self._connector.run()
        self._fetcher.stop()
        with self._condition:
            self._failure = self._failure or failure
            self._over = True
            self._ended(self._failure)
            self._condition.notify_all()
