"""A DP rank's client without torch: a thread that receives, and calls that wait for it.

`MicroBatchStream` is built on it; by itself it serves load generators and tests, which look at
micro-batches as numpy arrays.
"""

import threading
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from rollout_dispatcher.errors import ClientClosed, DispatcherError
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.transport.memory import Memory
from rollout_workers.client.checked import validated
from rollout_workers.client.credentials import Credentials
from rollout_workers.rank.core import RankCore
from rollout_workers.rank.memory_pool import MemoryPool
from rollout_workers.rank.steps import StepClient
from rollout_workers.rank.thread import RankThread


class RankClient(StepClient):
    """Connects when made, and keeps at it until closed; a context manager.

    generation: None asks for a new generation, which only DP rank 0 may do.
    prefetch_steps: steps to receive ahead of the training loop.
    reconnect_timeout: seconds to keep trying when the dispatcher cannot be reached; then, as for
        every other failure, each call raises the error.
    credentials: what to show and trust; default: what the environment says.
    packed_length: tokens that micro-batches are padded to, for the dispatcher to check and count.
    training: what shapes gradients, by name; the dispatcher refuses DP ranks that differ in it.
    memory: gives what a micro-batch's payload is received into; default: a pool of its own.
    whole_steps: whether to hand a step out only once all of its micro-batches are here.

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
        training: Mapping[str, str] | None = None,
        memory: Memory | None = None,
        whole_steps: bool = False,
    ) -> None:
        address = Endpoint.parse(endpoint)
        shown = Credentials.from_environment() if credentials is None else credentials
        core = self._make_core(
            uuid4().hex, dp_rank, dp_size, generation, prefetch_steps,
            packed_length=packed_length, training=training,
        )  # fmt: skip
        validated(core.hello)
        memory = memory or MemoryPool()
        changed = self._make_condition()
        self._thread = RankThread(
            address, core, changed, reconnect_timeout,
            credentials=shown, memory=memory, ended=self._ended,
        )  # fmt: skip
        super().__init__(core, changed, self._thread, whole_steps=whole_steps)

    # -- what a client that others listen to does otherwise

    def _make_core(self, *where: Any, **options: Any) -> RankCore:
        return RankCore(*where, **options)

    def _make_condition(self) -> threading.Condition:
        return threading.Condition()

    def _ended(self, failure: DispatcherError | None) -> None:
        """The thread ends, for good; called in it, with the condition held."""

    def _check(self) -> None:
        super()._check()
        if self._thread.over and not self._core.finished:
            raise ClientClosed(
                "the stream had ended and its dispatcher was gone before it heard of the "
                "checkpoint; make a new stream"
            )
