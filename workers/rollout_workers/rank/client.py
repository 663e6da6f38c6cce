"""A DP rank's client without torch: a thread that receives, and calls that wait for it.

`MicroBatchStream` is built on it; by itself it serves load generators and tests, which look at
micro-batches as numpy arrays. The training loop and the thread share one `RankCore` under one
condition variable: every change notifies, every wait is for a state, and the thread's end, for
whatever reason, is such a change. So nobody waits for something that can no longer come.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Literal, NoReturn, Self, TypeVar
from uuid import uuid4

from rollout_dispatcher.errors import ClientClosed
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.client.checked import validated
from rollout_workers.client.credentials import Credentials
from rollout_workers.client.own_process import OwnProcess, refuse_to_travel
from rollout_workers.rank.core import RankCore
from rollout_workers.rank.held_steps import HeldStep, Received
from rollout_workers.rank.memory_pool import MemoryPool
from rollout_workers.rank.thread import RankThread

T = TypeVar("T")


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

    def __init__(self, client: "RankClient", header: m.StepHeader) -> None:
        self._client = client
        self.header = header

    def __len__(self) -> int:
        return self.header.num_micro_batches

    def __iter__(self) -> Iterator[Received]:
        return map(self.micro_batch, range(len(self)))

    def micro_batch(self, index: int) -> Received:
        """Wait for one of its micro-batches; see `RankClient.micro_batch`."""
        return self._client.micro_batch(self.header.step, index)

    def has(self, index: int) -> bool:
        """Whether one of its micro-batches is here; raises StepContractError once committed."""
        return self._client.has(self.header.step, index)

    def commit(self) -> None:
        """Queue the step's commit; see `RankClient.commit`."""
        self._client.commit(self.header.step)


class RankClient:
    """Connects when made, and keeps at it until closed; a context manager.

    generation: None asks for a new generation, which only DP rank 0 may do.
    prefetch_steps: steps to receive ahead of the training loop.
    reconnect_timeout: seconds to keep trying when the dispatcher cannot be reached; then, as for
        every other failure, each call raises the error.
    credentials: what to show and trust; default: what the environment says.
    packed_length: tokens that micro-batches are padded to, for the dispatcher to check and count.
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
        memory: Memory | None = None,
    ) -> None:
        address = Endpoint.parse(endpoint)
        shown = Credentials.from_environment() if credentials is None else credentials
        core = RankCore(
            uuid4().hex, dp_rank, dp_size, generation, prefetch_steps, packed_length=packed_length
        )
        validated(core.hello)
        self._core, self._condition = core, threading.Condition()
        self._process = OwnProcess("stream")
        self._steps_taken = self._steps_committed = self._micro_batches = 0
        self._step_wait_s = self._micro_batch_wait_s = 0.0
        self._thread = RankThread(
            address, core, self._changed, reconnect_timeout,
            credentials=shown, memory=memory or MemoryPool(),
        )  # fmt: skip
        try:
            self._welcome = self._wait(lambda: core.welcome)
        except BaseException:
            self.close()
            raise
        self.run_id = self._welcome.run_id
        self.generation = self._welcome.generation
        self.layout = self._welcome.layout
        self.sample_length_multiple = self._welcome.sample_length_multiple or 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        refuse_to_travel("stream")

    @property
    def _changed(self) -> threading.Condition:
        """What guards the core; in a forked child it may be held by a thread that is not there."""
        self._process.check()
        return self._condition

    @property
    def end_reason(self) -> str | None:
        """Why the stream has ended; None while it has not."""
        return self._core.end_reason

    def next_step(self, timeout: float | None = None) -> RankStep | None:
        """Wait for the next released step; None when the stream has ended.

        Raises TimeoutError after `timeout` seconds, StepContractError when too many steps are
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
            self._thread.wake()
        return RankStep(self, held.header)

    def micro_batch(self, step: int, index: int) -> Received:
        """Wait for one micro-batch of a taken step.

        Raises StepContractError when the step is committed, or the error that ended the
        connection for good.
        """
        began = monotonic()
        with self._changed:
            try:
                found = self._wait(lambda: self._received(step, index))
            finally:
                self._micro_batch_wait_s += monotonic() - began
            self._micro_batches += 1
            return found

    def has(self, step: int, index: int) -> bool:
        """Whether `micro_batch` would return at once; raises StepContractError once committed."""
        with self._changed:
            return self._received(step, index) is not None

    def commit(self, step: int) -> None:
        """Queue the commit of the oldest taken step and return.

        Raises StepContractError, which names the step that is due, when it is another one.
        """
        with self._changed:
            self._check()
            self._core.commit(step)
            self._steps_committed += 1
        self._thread.wake()

    def set_policy_version(self, version: int) -> None:
        """Report the version of the weights that the next step to begin trains with.

        Raises ConfigError below 0, StepContractError for one below the last; see
        `MicroBatchStream.set_policy_version`.
        """
        with self._changed:
            self._check()
            validated(lambda: self._core.set_policy_version(version))
        self._thread.wake()

    @property
    def position(self) -> int:
        """The last step that is in the trainer's weights, as far as was said; -1 for none."""
        with self._changed:
            return self._core.position

    def resume(self, position: m.CheckpointPosition) -> None:
        """The trainer has loaded a checkpoint: go on after it, as every rank has to say.

        Returns once the dispatcher has agreed; `self.position` is later than asked for if steps
        cannot be given again. Raises StepContractError after the first `next_step`, or
        CheckpointRefused; the client is over then.
        """
        with self._changed:
            self._check()
            self._core.resume(position)
        self._thread.wake()
        self._wait(lambda: None if self._core.resuming else True)

    def checkpoint_saved(self, step: int) -> None:
        """A checkpoint taken after that step is durable; DP rank 0's word counts."""
        with self._changed:
            self._check()
            self._core.checkpoint_saved(step)
        self._thread.wake()

    def statistics(self) -> RankStatistics:
        """A snapshot; cheap, and safe from any thread."""
        with self._changed:
            return RankStatistics(
                steps_taken=self._steps_taken,
                steps_committed=self._steps_committed,
                micro_batches=self._micro_batches,
                bytes_received=self._thread.bytes_received,
                reconnects=self._thread.reconnects,
                step_wait_s=self._step_wait_s,
                micro_batch_wait_s=self._micro_batch_wait_s,
            )

    def close(self) -> None:
        """Deliver what was committed, say goodbye, end the thread. Idempotent, bounded in time."""
        self._thread.stop()

    # -- waiting

    def _wait(self, found: Callable[[], T | None], timeout: float | None = None) -> T:
        """The first value that `found` has; raises what the thread ended with."""
        deadline = None if timeout is None else monotonic() + timeout
        with self._changed:
            while True:
                self._check()
                value = found()
                if value is not None:
                    return value
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"nothing within {timeout} s")
                self._changed.wait(left)

    def _next_or_end(self) -> HeldStep | Literal[True] | None:
        held = self._core.ready()
        if self._core.exhausted:
            return True
        if held is None and not self._core.hungry:
            self._core.demand(hungry=True)
            self._thread.wake()
        return held

    def _received(self, step: int, index: int) -> Received | None:
        held = self._core.begin(step).micro_batches
        return held[index] if index < len(held) else None

    def _check(self) -> None:
        if self._thread.failure is not None:
            raise self._thread.failure
        if self._thread.stopping:
            raise ClientClosed("the stream is closed")
        if self._thread.over and not self._core.finished:
            raise ClientClosed(
                "the stream had ended and its dispatcher was gone before it heard of the "
                "checkpoint; make a new stream"
            )
