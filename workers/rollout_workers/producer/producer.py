"""`AsyncRolloutProducer` and `RolloutProducer`: push finished rollouts, from asyncio or threads.

Each call waits for the dispatcher's answer, so the concurrent calls bound what a producer holds.

`_Producer` defines every call once; each class wraps it as a method that blocks or is awaited. The
event loop of `RolloutProducer` runs in one private thread; any number of threads may push. A
finalizer says goodbye at exit or when the producer is collected, whichever is first.
"""

# ruff: noqa: SLF001  both classes wrap private methods of their base

import asyncio
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from functools import update_wrapper
from inspect import signature
from secrets import token_hex
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar, get_args

from rollout_dispatcher.errors import (
    ClientClosed,
    ConfigError,
    RunFinished,
    SampleRefused,
    ShuttingDown,
    StreamEnded,
)
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.sample import Outcome
from rollout_workers.client.connector import Credentials
from rollout_workers.client.process import (
    Closing,
    LoopThread,
    OwnProcess,
    forbid_pickle,
    validated,
)
from rollout_workers.client.role import CLOSE_TIMEOUT_S
from rollout_workers.feedback import DroppedSample, Feedback
from rollout_workers.producer.client import ProducerClient
from rollout_workers.producer.encode import (
    EncodedSample,
    Encoder,
    GroupSize,
    Pushable,
    ReferencedSample,
    RolloutSample,
    encode_references,
    rollout_samples,
)
from rollout_workers.producer.layout import ArrayLike
from rollout_workers.producer.pushes import GENERATED

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
#: Waits for the dispatcher's answer, in the event loop of the connection.
_Call = Coroutine[Any, Any, _T]


class _Producer:
    """Base of both: each call checks and encodes at once, and returns a coroutine for the answer.

    So a blocking call encodes in its caller's thread.
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
        credentials: Credentials | None = None,
    ) -> None:
        if on_run_change not in ("warn", "raise"):
            raise ConfigError(f"on_run_change is {on_run_change!r}; choose from warn, raise")
        shown = Credentials.from_environment() if credentials is None else credentials
        self._encoder = Encoder(
            per_sample, ragged,
            loss_mask_shifted=loss_mask_shifted, allow_non_finite=allow_non_finite,
        )  # fmt: skip
        self._loss_mask_shifted = loss_mask_shifted
        self._client = ProducerClient(
            Endpoint.parse(endpoint), reconnect_timeout, shown, self._encoder.on_schema,
            raises_run_change=on_run_change == "raise",
        )  # fmt: skip
        self._group_size = group_size
        self._begin()

    def _begin(self) -> None:
        """Called at the end of the constructor."""

    def __reduce__(self) -> NoReturn:
        forbid_pickle("producer")

    @property
    def run_id(self) -> str:
        """Id of the run that takes this producer's samples; it changes when the run does."""
        return self._client.core.run_id

    def feedback(self) -> Feedback:
        """The trainer's progress as last reported: how far this producer is ahead of it.

        The dispatcher sends it with the answers to pushes and when it changes.
        """
        return self._client.core.flow.feedback()

    def dropped(self) -> list[DroppedSample]:
        """Accepted samples of this producer that will not be trained on, each returned once.

        Best effort: drops while this producer is not connected appear in the dispatcher's metrics
        alone, and only the newest 16,384 are kept between two calls.
        """
        return self._client.core.flow.take_dropped()

    # -- calls, which the classes below wrap without the underscore

    def _push(
        self,
        fields: Mapping[str, ArrayLike],
        *,
        sample_id: str | None = None,
        group_id: str | None = None,
        group_size: GroupSize | None = None,
        policy_version: int | None = None,
        staleness_exempt: bool = False,
        timeout: float | None = None,
    ) -> _Call[Outcome]:
        """Push one sample; returns when the dispatcher holds it.

        fields: `input_ids` [tokens] and other tensors, arrays, lists or texts; see `RolloutSample`.
            Leave them unchanged until this returns or raises: large ones are sent without a copy.
        timeout: seconds to wait, for a cap of the buffer for instance; above 0, or None for no
            limit.

        Returns `DUPLICATE` or `CONFLICT` if a sample of this `sample_id` was accepted before, from
        any producer, with the same or with other content: this one is not trained on.

        Raises SampleRefused for an unacceptable sample; RunFinished when nothing is trained on any
        more: the trainer has finished the run or has left for good, the stream has ended
        (StreamEnded) or the dispatcher stops (ShuttingDown; these two are SampleRefused, too);
        after `timeout` BufferFull, which names the cap, or PushTimeout, a TimeoutError, if the
        dispatcher named none. A sample that was already sent then may still be accepted (the error
        or a note on it says so); push it again with its `sample_id` from `error.sample_ids`: with a
        `timeout` a sample without an id of yours is given one.
        """
        sample = RolloutSample(
            fields, sample_id, group_id, group_size, policy_version, staleness_exempt
        )
        return self._push_one(self._encode([sample], timeout), timeout)

    def _push_many(
        self, samples: Iterable[Pushable], *, timeout: float | None = None
    ) -> _Call[list[Outcome]]:
        """Push samples in as few frames as possible; one outcome each, in order.

        samples: mappings of fields, as for `push`, or `RolloutSample` where there is metadata.

        Raises as `push` does; if some are refused, the others are accepted nevertheless.
        """
        return self._push_encoded(self._encode(samples, timeout), timeout)

    def _push_group(
        self,
        samples: Iterable[Pushable],
        group_id: str,
        *,
        group_size: GroupSize | None = None,
        timeout: float | None = None,
    ) -> _Call[list[Outcome]]:
        """Push members of one group; `group_size` is their number unless given.

        Raises as `push_many` does; a dispatcher with `--group-size` refuses groups of another size.
        """
        return self._push_many(members(samples, group_id, group_size), timeout=timeout)

    def _push_references(
        self, samples: Iterable[ReferencedSample], *, timeout: float | None = None
    ) -> _Call[list[Outcome]]:
        """Push samples that are in a payload store already; one outcome each, in order.

        The store is one of the dispatcher's `--payload-stores`, and the caller has put the objects
        there. The dispatcher owns them from then on and has them released, those of refused and
        duplicate samples too.

        Raises as `push` does, and SampleRefused for an inconsistent reference before anything is
        pushed.
        """
        return self._push_encoded(self._encode_references(samples, timeout), timeout)

    def _close_group(
        self, group_id: str, *, size: int | None = None, keep: bool | None = None
    ) -> _Call[None]:
        """Announce that this group gets no further member, or none beyond `size` in all.

        A group that lacks members is then dropped whole, or with `keep` trained on as it is
        (default: the dispatcher's incomplete-groups). A group of size `at-close` is complete with
        its accepted members, or at `size`. Sent once earlier pushes of the group are answered. If
        no member was accepted and no `size` is given, nothing is closed, and a warning is logged.
        """
        return self._client.control(
            validated(lambda: m.CloseGroup(group_id=group_id, size=size, keep=keep))
        )

    def _end_phase(self, policy_version: int, *, force: bool = False) -> _Call[None]:
        """Announce that this producer will push nothing older than `policy_version` any more.

        Once every producer that has contributed to the run has announced it, has ended its stream
        or has left, all samples older than `policy_version` are dispatched before newer ones. With
        `force` at once: a controller decides for all of them. Sent once all earlier pushes are
        answered.
        """
        message = validated(lambda: m.EndPhase(policy_version=policy_version, force=force))
        return self._client.control(message)

    def _end_stream(self, *, force: bool = False) -> _Call[None]:
        """Announce that this producer will push nothing any more.

        Once every producer that has contributed has announced it or has left, the dispatcher
        flushes its buffer and ends the ranks' streams. With `force` at once: a controller decides
        for all of them. Sent once all earlier pushes are answered, without a time limit; those that
        raised BufferFull or TimeoutError and may still be accepted count too.
        """
        return self._client.control(m.EndStream(force=force))

    def _next_feedback(self, after: Feedback, *, timeout: float | None = None) -> _Call[Feedback]:
        """Wait until the feedback differs from `after`, or for `timeout` seconds; return it.

        To keep pace with the trainer, before a rollout begins:

            feedback = producer.feedback()
            while feedback.would_expire(policy_version):
                feedback = await producer.next_feedback(feedback, timeout=10)
        """
        return self._client.next_feedback(after, timeout)

    # -- mechanism

    def _encode(self, samples: Iterable[Pushable], timeout: float | None) -> list[EncodedSample]:
        """Check samples and find their memory; raises SampleRefused. Any thread may."""
        found = _named(rollout_samples(samples), timeout)
        if self._group_size is not None:
            found = [self._sized(item) for item in found]
        return self._encoder.encode(found)

    def _encode_references(
        self, samples: Iterable[ReferencedSample], timeout: float | None
    ) -> list[EncodedSample]:
        """Check samples that are in a payload store; raises SampleRefused. Any thread may."""
        if self._loss_mask_shifted:
            raise SampleRefused(
                "bad-sample",
                "this producer was made with loss_mask_shifted=True, and the loss_mask of a "
                "referenced sample is read as it lies: write it with loss_mask[i] for token i, and "
                "push its reference by another producer",
            )
        stores = self._client.core.objects.stores
        return encode_references(_named(samples, timeout), stores, self._group_size)

    async def _push_one(self, sample: Sequence[EncodedSample], timeout: float | None) -> Outcome:
        return (await self._push_encoded(sample, timeout))[0]

    async def _push_encoded(
        self, samples: Sequence[EncodedSample], timeout: float | None
    ) -> list[Outcome]:
        """An outcome for each; raises as `push_many` does."""
        if timeout is not None and not timeout > 0:
            raise ConfigError(
                f"timeout is {timeout}, and no answer comes at once; give seconds above 0, or None "
                "to wait for as long as it takes"
            )
        found = await self._client.deliver(samples, timeout)
        accepted = [item for item in found if isinstance(item, Outcome)]
        if len(accepted) == len(found):
            return accepted
        over = next((e for e in found if getattr(e, "reason", "") == RunFinished.code), None)
        if over is not None:
            raise RunFinished(f"{over}; of {len(found)} samples {len(accepted)} were accepted")
        index, first = next((i, e) for i, e in enumerate(found) if isinstance(e, SampleRefused))
        if len(found) == 1:
            raise first
        counted = f"{len(found) - len(accepted)} of {len(found)} samples were refused"
        others = ", the others accepted" if accepted else ""
        text = f"{counted}{others}; the first, at index {index}: {first}"
        if isinstance(first, StreamEnded | ShuttingDown):
            raise type(first)(text)
        raise SampleRefused(first.reason, text)

    def _sized(self, sample: RolloutSample) -> RolloutSample:
        if sample.group_id is None or sample.group_size is not None:
            return sample
        return replace(sample, group_size=self._group_size)


_Sample = TypeVar("_Sample", RolloutSample, ReferencedSample)


def _named(samples: Iterable[_Sample], timeout: float | None) -> list[_Sample]:
    """With an id for each if their push may time out, by which they can be pushed again."""
    if timeout is None:
        return list(samples)
    return [
        sample
        if not isinstance(sample, (RolloutSample, ReferencedSample)) or sample.sample_id is not None
        else replace(sample, sample_id=GENERATED + token_hex(12))
        for sample in samples
    ]


def members(
    samples: Iterable[Pushable], group_id: str, group_size: GroupSize | None
) -> list[RolloutSample]:
    """The samples as members of one group, whose size is their number unless given.

    Raises SampleRefused for anything but a sample, or for a member of another group.
    """
    found = rollout_samples(samples)
    other = next((item.group_id for item in found if item.group_id not in (None, group_id)), None)
    if other is not None:
        raise SampleRefused("bad-metadata", f"a sample of group {other} is pushed as of {group_id}")
    size = len(found) if group_size is None else group_size
    return [replace(sample, group_id=group_id, group_size=size) for sample in found]


T = TypeVar("T")


def _awaited(
    method: Callable[Concatenate[_Producer, _P], _Call[_T]],
) -> Callable[Concatenate["AsyncRolloutProducer", _P], _Call[_T]]:
    """A method to be awaited, which raises only then."""

    async def call(self: "AsyncRolloutProducer", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await method(self, *args, **kwargs)

    return _named_after(method, call)


def _blocking(
    method: Callable[Concatenate[_Producer, _P], _Call[_T]],
) -> Callable[Concatenate["RolloutProducer", _P], _T]:
    """A method that returns the answer."""

    def call(self: "RolloutProducer", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._call(method(self, *args, **kwargs))

    return _named_after(method, call)


def _named_after(method: Callable[..., Any], call: _F) -> _F:
    """Give `call` the method's docstring and signature, and its public name."""
    update_wrapper(call, method)
    call.__name__ = method.__name__.removeprefix("_")
    shown = signature(method)
    answer = get_args(shown.return_annotation)[-1]
    call.__signature__ = shown.replace(return_annotation=answer)  # type: ignore[attr-defined]
    return call


class AsyncRolloutProducer(_Producer):
    """Pushes finished rollouts to the dispatcher; an async context manager.

    endpoint: `host:port`, `tls://host:port` or `unix:/path`.
    per_sample: names of fields with one value per sample (`image_grid` [3], say); a field without
        dimensions is per-sample anyway, every other field is per-token.
    ragged: names of fields whose first dimension is a number of rows that differs by sample, 0 or
        more (`pixel_values` [patches, 1176], `image_grid_thw` [images, 3]); a str is ragged anyway.
    loss_mask_shifted: whether `loss_mask[i]` marks token i + 1 as a target, as in a mask made for
        logits; by default it marks token i. `push_references` is refused then: a mask inside a
        store cannot be shifted.
    allow_non_finite: whether fields of one number per token or sample may be NaN or infinite; by
        default such a sample is refused. Wider and ragged fields are not checked.
    group_size: members of every group, for pushes with a `group_id` but no size; `at-close` if
        `close_group` gives the size.
    reconnect_timeout: seconds to retry while the dispatcher cannot be reached; then every call
        raises DispatcherUnreachable.
    on_run_change: the reaction to a dispatcher that returns with another run, as after a restart
        without a journal: its accepted, untrained samples are lost. `warn` logs that and goes on;
        `raise` ends the producer, and every call raises RunChanged.
    credentials: secrets and certificates; default: from the environment.

    It belongs to the process that made it: in a forked child every call raises ConfigError.
    """

    push = _awaited(_Producer._push)
    push_many = _awaited(_Producer._push_many)
    push_group = _awaited(_Producer._push_group)
    push_references = _awaited(_Producer._push_references)
    close_group = _awaited(_Producer._close_group)
    end_phase = _awaited(_Producer._end_phase)
    end_stream = _awaited(_Producer._end_stream)
    next_feedback = _awaited(_Producer._next_feedback)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect; returns when the dispatcher has welcomed this producer.

        Raises DispatcherUnreachable after `reconnect_timeout`, or the dispatcher's refusal.
        """
        await self._client.start()

    async def close(self) -> None:
        """Say goodbye and disconnect; pending calls raise ClientClosed. Idempotent."""
        await self._client.close()


class RolloutProducer(_Producer, Closing):
    """Pushes finished rollouts to the dispatcher; a context manager that threads may share.

    Connects when made. Its arguments and methods are those of `AsyncRolloutProducer`.
    """

    push = _blocking(_Producer._push)
    push_many = _blocking(_Producer._push_many)
    push_group = _blocking(_Producer._push_group)
    push_references = _blocking(_Producer._push_references)
    close_group = _blocking(_Producer._close_group)
    end_phase = _blocking(_Producer._end_phase)
    end_stream = _blocking(_Producer._end_stream)
    next_feedback = _blocking(_Producer._next_feedback)

    def _begin(self) -> None:
        self._process = process = OwnProcess("producer")
        self._thread = LoopThread("rollout-producer")
        self._stop = weakref.finalize(self, _stop, process, self._thread, self._client)
        try:
            self._call(self._client.start())
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """Say goodbye and disconnect; pending calls raise ClientClosed. Idempotent."""
        self._stop()

    def _call(self, work: _Call[_T]) -> _T:
        """Run a coroutine in the private thread; interrupting the wait cancels it."""
        try:
            self._process.check()
            if not self._stop.alive:
                raise ClientClosed("the producer is closed")
        except BaseException:
            work.close()
            raise
        future: Future[_T] | None = None
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
        """Cancel a coroutine, and wait until it has released the caller's arrays; bounded."""
        with suppress(Exception):  # the loop has ended or is stuck
            self._thread.submit(_end(work)).result(CLOSE_TIMEOUT_S)


async def _end(work: Coroutine[Any, Any, Any]) -> None:
    """Cancel the task of this coroutine, if there is one, and wait for its end."""
    for task in [task for task in asyncio.all_tasks() if task.get_coro() is work]:
        task.cancel()
        await asyncio.wait([task])


def _stop(process: OwnProcess, thread: LoopThread, client: ProducerClient) -> None:
    """Close the connection, then the loop; bounded, as it also runs when the interpreter exits."""
    if not process.is_here:  # a forked child
        return
    thread.finish(client.close())
    thread.join(2 * CLOSE_TIMEOUT_S)
