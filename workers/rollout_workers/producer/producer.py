"""`AsyncRolloutProducer` and `RolloutProducer`: push finished rollouts, from asyncio or threads.

Each call waits for the dispatcher's answer, so what a producer holds is bounded by the calls that
run at the same time.

Every call is defined once, and each class makes a method of its kind of it. The event loop of
`RolloutProducer` runs in one private thread;
any number of threads may push. A finalizer says goodbye, at exit or when the producer is garbage,
whichever is first.
"""

# ruff: noqa: SLF001  a class makes its methods of its base's

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
#: What waits for the dispatcher's answer, in the event loop of the connection.
_Call = Coroutine[Any, Any, _T]


class _Producer:
    """What both have: each call checks and encodes at once, and returns what waits for the answer.

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
        """Called when it is made."""

    def __reduce__(self) -> NoReturn:
        forbid_pickle("producer")

    @property
    def run_id(self) -> str:
        """Of the run that takes this producer's samples; another one after a change of runs."""
        return self._client.core.run_id

    def feedback(self) -> Feedback:
        """What the dispatcher has said last of the trainer: how far this producer is ahead of it.

        It comes with the answers to pushes and, when something changes, by itself.
        """
        return self._client.core.flow.feedback()

    def dropped(self) -> list[DroppedSample]:
        """Samples of this producer that were accepted and will not be trained on, each told once.

        Best effort: what is dropped while this producer is not connected is counted by the
        dispatcher alone, and of more than 16,384 that nobody asks for the newest are kept.
        """
        return self._client.core.flow.take_dropped()

    # -- made into methods below, without the underscore

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
            Leave them unchanged until this returns or raises: large ones are sent from where they
            are.
        timeout: seconds to wait, for a cap of the buffer for instance; above 0, or None for as
            long as it takes.

        Returns `DUPLICATE` or `CONFLICT` where a sample of this `sample_id` was accepted before,
        from whichever producer, with the same content or with other: it is not trained on.

        Raises SampleRefused when it is not acceptable; RunFinished when nothing more is trained on:
        the trainer has finished the run or has left for good, the stream has ended (StreamEnded) or
        the dispatcher stops (ShuttingDown; these two are SampleRefused, too); after `timeout`
        BufferFull, which names the cap, or PushTimeout, a TimeoutError, if no cap was named. A
        sample that was already on its way then may still be accepted (the error or a note on it
        says so); push it again with the `sample_id` that it had, which is in `error.sample_ids`:
        without one of yours it was given one, as `timeout` is set.
        """
        sample = RolloutSample(
            fields, sample_id, group_id, group_size, policy_version, staleness_exempt
        )
        return self._push_one(self._encode([sample], timeout), timeout)

    def _push_many(
        self, samples: Iterable[Pushable], *, timeout: float | None = None
    ) -> _Call[list[Outcome]]:
        """Push samples in as few frames as they fit in; one outcome each, in order.

        samples: mappings of fields, as for `push`, or `RolloutSample` where there is metadata.

        Raises as `push` does; when some are refused the others are accepted nevertheless.
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
        """Push samples that lie in a payload store already; one outcome each, in order.

        For those who have put them there themselves, or keep them in an engine that is one of the
        dispatcher's `--payload-stores`. From then on their objects are the dispatcher's, which has
        them released; also of samples that are refused or there twice.

        Raises as `push` does, and for samples that cannot be as they are said before anything is
        pushed.
        """
        return self._push_encoded(self._encode_references(samples, timeout), timeout)

    def _close_group(
        self, group_id: str, *, size: int | None = None, keep: bool | None = None
    ) -> _Call[None]:
        """Say that no further member of this group will come, or none beyond `size` in all.

        A group that lacks members is then dropped whole, or with `keep` trained on as it is
        (default: the dispatcher's incomplete-groups). One whose size was to be told `at-close`
        has the members that came, or `size`. Goes out when its pushes begun before are answered.
        Where no member has come and no `size` is told, nothing is closed, and a warning says so.
        """
        return self._client.control(
            validated(lambda: m.CloseGroup(group_id=group_id, size=size, keep=keep))
        )

    def _end_phase(self, policy_version: int, *, force: bool = False) -> _Call[None]:
        """Say that this producer will push nothing older than `policy_version` any more.

        When every producer that has contributed to the run has said so, or has ended its stream, or
        has left, all samples older than `policy_version` are dispatched before anything newer. With
        `force` at once: a controller speaks for all of them. Goes out when every push begun before
        it is answered.
        """
        message = validated(lambda: m.EndPhase(policy_version=policy_version, force=force))
        return self._client.control(message)

    def _end_stream(self, *, force: bool = False) -> _Call[None]:
        """Say that this producer will push nothing any more.

        When every producer that has contributed has said so, or has left, the rest is flushed and
        the ranks' streams end. With `force` at once: a controller speaks for all of them. Goes out
        when every push begun before it is answered, however long that takes: also one that has
        raised BufferFull or TimeoutError and may still be accepted.
        """
        return self._client.control(m.EndStream(force=force))

    def _next_feedback(self, after: Feedback, *, timeout: float | None = None) -> _Call[Feedback]:
        """Wait until the feedback is another than `after`, or for `timeout` seconds; return it.

        To keep pace with the trainer, before a rollout is begun:

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
        """Check samples that lie in a payload store; raises SampleRefused. Any thread may."""
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
    """The samples as members of one group, of their own number unless `group_size` is given.

    Raises SampleRefused for what is no sample, or a member of another group.
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
    """A method to be awaited, which raises when it is."""

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
    """With its docstring and signature, under its public name."""
    update_wrapper(call, method)
    call.__name__ = method.__name__.removeprefix("_")
    shown = signature(method)
    answer = get_args(shown.return_annotation)[-1]
    call.__signature__ = shown.replace(return_annotation=answer)  # type: ignore[attr-defined]
    return call


class AsyncRolloutProducer(_Producer):
    """Pushes finished rollouts to the dispatcher; an async context manager.

    endpoint: `host:port`, `tls://host:port` or `unix:/path`.
    per_sample: names of fields that have one value a sample (`image_grid` [3], say); fields
        without dimensions are per-sample anyway, every other field is per-token.
    ragged: names of fields whose first dimension is a number of rows of each sample's own, 0 or
        more (`pixel_values` [patches, 1176], `image_grid_thw` [images, 3]); a str is text anyway.
    loss_mask_shifted: whether `loss_mask[i]` says of token i + 1 that it is a target, as where the
        mask was made for logits; by default it says so of token i. `push_references` is refused
        then: such a mask cannot be moved where it lies.
    allow_non_finite: whether fields of one number a token or a sample may be NaN or infinite; by
        default such a sample is refused. Wider and ragged fields are not looked at.
    group_size: members of every group, for pushes that name a `group_id` but no size; `at-close` if
        nobody knows before `close_group`.
    reconnect_timeout: seconds to keep trying when the dispatcher cannot be reached; then every
        call raises DispatcherUnreachable.
    on_run_change: where the dispatcher comes back with another run than before, as one that is
        restarted without a journal does: accepted samples that it had not trained are gone. `warn`
        logs that and goes on; `raise` ends the producer, and every call raises RunChanged.
    credentials: what to show and trust; default: what the environment says.

    It belongs to the process that makes it: in a forked child every call raises ConfigError.
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
        """Say goodbye and disconnect; a call that still waits gets ClientClosed. Idempotent."""
        await self._client.close()


class RolloutProducer(_Producer, Closing):
    """Pushes finished rollouts to the dispatcher; a context manager, safe to share by threads.

    Connects when made. Takes the arguments of `AsyncRolloutProducer`, and its methods mean and
    raise the same.
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
        """Say goodbye and disconnect; a call that still waits gets ClientClosed. Idempotent."""
        self._stop()

    def _call(self, work: _Call[_T]) -> _T:
        """Run a coroutine in the private thread; an interrupted wait cancels it."""
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
        """Cancel a coroutine, and wait until it has let go of the caller's arrays; bounded."""
        with suppress(Exception):  # the loop has ended, and sends nothing any more, or is stuck
            self._thread.submit(_end(work)).result(CLOSE_TIMEOUT_S)


async def _end(work: Coroutine[Any, Any, Any]) -> None:
    """Cancel the task of this coroutine, if there is one, and wait for its end."""
    for task in [task for task in asyncio.all_tasks() if task.get_coro() is work]:
        task.cancel()
        await asyncio.wait([task])


def _stop(process: OwnProcess, thread: LoopThread, client: ProducerClient) -> None:
    """Close the connection, then the loop; bounded, as it also runs when the interpreter exits."""
    if not process.is_here:  # that of a forked child
        return
    thread.finish(client.close())
    thread.join(2 * CLOSE_TIMEOUT_S)
