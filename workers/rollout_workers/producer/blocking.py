"""`RolloutProducer`: the blocking shell around `AsyncRolloutProducer`.

Its event loop runs in one private thread; any number of threads may push. A finalizer says goodbye,
at exit or when the producer is garbage, whichever is first.
"""

import asyncio
import weakref
from collections.abc import Collection, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from rollout_dispatcher.errors import ClientClosed
from rollout_dispatcher.sample import Outcome
from rollout_workers.client.closing import Closing
from rollout_workers.client.credentials import Credentials
from rollout_workers.client.liveness import CLOSE_TIMEOUT_S
from rollout_workers.client.loop_thread import LoopThread
from rollout_workers.client.own_process import OwnProcess, refuse_to_travel
from rollout_workers.feedback import DroppedSample, Feedback
from rollout_workers.metadata import GroupSize
from rollout_workers.producer.asynchronous import AsyncRolloutProducer, members
from rollout_workers.producer.encode import Pushable, RolloutSample
from rollout_workers.producer.stored.references import ReferencedSample
from rollout_workers.producer.to_array import ArrayLike

T = TypeVar("T")


class RolloutProducer(Closing):
    """Pushes finished rollouts to the dispatcher; a context manager, safe to share by threads.

    Connects when made. Takes the arguments of `AsyncRolloutProducer`, and its methods mean and
    raise the same.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        per_sample: Collection[str] = (),
        ragged: Collection[str] = (),
        loss_mask_shifted: bool = False,
        allow_non_finite: bool = False,
        group_size: GroupSize | None = None,
        reconnect_timeout: float = 300.0,
        on_run_change: str = "warn",
        on_conflict: str = "warn",
        credentials: Credentials | None = None,
    ) -> None:
        self._inner = AsyncRolloutProducer(
            endpoint,
            per_sample=per_sample,
            ragged=ragged,
            loss_mask_shifted=loss_mask_shifted,
            allow_non_finite=allow_non_finite,
            group_size=group_size,
            reconnect_timeout=reconnect_timeout,
            on_run_change=on_run_change,
            on_conflict=on_conflict,
            credentials=credentials,
        )
        self._process = process = OwnProcess("producer")
        self._thread = LoopThread("rollout-producer")
        self._stop = weakref.finalize(self, _stop, process, self._thread, self._inner)
        try:
            self._call(self._inner.start())
        except BaseException:
            self._stop()
            raise

    def __reduce__(self) -> NoReturn:
        refuse_to_travel("producer")

    @property
    def run_id(self) -> str:
        """Of the run that takes this producer's samples; another one after a change of runs."""
        return self._inner.run_id

    def push(
        self,
        fields: Mapping[str, ArrayLike],
        *,
        sample_id: str | None = None,
        group_id: str | None = None,
        group_size: GroupSize | None = None,
        policy_version: int | None = None,
        staleness_exempt: bool = False,
        timeout: float | None = None,
    ) -> Outcome:
        """Push one sample; see `AsyncRolloutProducer.push`."""
        sample = RolloutSample(
            fields, sample_id, group_id, group_size, policy_version, staleness_exempt
        )
        return self.push_many([sample], timeout=timeout)[0]

    def push_many(
        self, samples: Iterable[Pushable], *, timeout: float | None = None
    ) -> list[Outcome]:
        """Push samples; see `AsyncRolloutProducer.push_many`."""
        encoded = self._inner.encode(samples)
        return self._call(self._inner.push_encoded(encoded, timeout=timeout))

    def push_group(
        self,
        samples: Iterable[Pushable],
        group_id: str,
        *,
        group_size: GroupSize | None = None,
        timeout: float | None = None,
    ) -> list[Outcome]:
        """Push members of one group; `group_size` is their number unless given."""
        return self.push_many(members(samples, group_id, group_size), timeout=timeout)

    def push_references(
        self, samples: Iterable[ReferencedSample], *, timeout: float | None = None
    ) -> list[Outcome]:
        """Push samples from a payload store; see `AsyncRolloutProducer.push_references`."""
        encoded = self._inner.encode_references(samples)
        return self._call(self._inner.push_encoded(encoded, timeout=timeout))

    def close_group(
        self, group_id: str, *, size: int | None = None, keep: bool | None = None
    ) -> None:
        """Say that a group gets no further member; see `AsyncRolloutProducer.close_group`."""
        self._call(self._inner.close_group(group_id, size=size, keep=keep))

    def end_phase(self, policy_version: int, *, force: bool = False) -> None:
        """Say that nothing older follows from here; see `AsyncRolloutProducer.end_phase`."""
        self._call(self._inner.end_phase(policy_version, force=force))

    def end_stream(self, *, force: bool = False) -> None:
        """Say that nothing follows from here; see `AsyncRolloutProducer.end_stream`."""
        self._call(self._inner.end_stream(force=force))

    def feedback(self) -> Feedback:
        """How far this producer is ahead of the trainer; see `AsyncRolloutProducer.feedback`."""
        return self._inner.feedback()

    def next_feedback(self, after: Feedback, *, timeout: float | None = None) -> Feedback:
        """Wait until that changes; see `AsyncRolloutProducer.next_feedback`."""
        return self._call(self._inner.next_feedback(after, timeout=timeout))

    def dropped(self) -> list[DroppedSample]:
        """Samples that will not be trained on; see `AsyncRolloutProducer.dropped`."""
        return self._inner.dropped()

    def close(self) -> None:
        """Say goodbye and disconnect; a call that still waits gets ClientClosed. Idempotent."""
        self._stop()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the private thread; an interrupted wait cancels it."""
        try:
            self._process.check()
            if not self._stop.alive:
                raise ClientClosed("the producer is closed")
        except BaseException:
            work.close()
            raise
        future: Future[T] | None = None
        try:
            future = self._thread.submit(work)
            return future.result()
        except CancelledError:
            raise ClientClosed("the producer was closed while the call waited") from None
        except BaseException:
            if future is None or not future.done():
                self._cancel(work)
            raise

    def _cancel(self, work: Coroutine[Any, Any, Any]) -> None:
        """Cancel a coroutine, and wait until it has let go of the caller's arrays; bounded."""
        with suppress(Exception):  # the loop has ended, and sends nothing any more, or is stuck
            self._thread.submit(_end(work)).result(CLOSE_TIMEOUT_S)


async def _end(work: Coroutine[Any, Any, Any]) -> None:
    """Cancel the task of this coroutine, if there is one, and wait for its end."""
    for task in [task for task in asyncio.all_tasks() if task.get_coro() is work]:
        task.cancel()
        await asyncio.wait([task])


def _stop(process: OwnProcess, thread: LoopThread, inner: AsyncRolloutProducer) -> None:
    """Close the connection, then the loop; bounded, as it also runs when the interpreter exits."""
    if not process.is_here:  # that of a forked child
        return
    thread.finish(inner.close())
    thread.join(2 * CLOSE_TIMEOUT_S)
