"""A call that is cancelled, at whichever of its awaits, leaves the producer as it should be."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_dispatcher.errors import ClientClosed
from rollout_workers import AsyncRolloutProducer, Outcome, RolloutSample
from tests.support.server import ServeProcess

pytestmark = pytest.mark.e2e

#: So large that each of a few samples is a frame of its own.
TOKENS = 6000


class CancelledAt:
    """Awaits something, and cancels the task at its n-th suspension, counted from 0.

    Just as the event loop would, had somebody cancelled the task while it waited there.
    """

    def __init__(self, awaited: Awaitable[Any], at: int) -> None:
        self._awaited, self._at = awaited, at
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._awaited.__await__()
        resume: Callable[[], Any] = inner.__next__
        while True:
            try:
                waited = resume()
            except StopIteration as done:
                return done.value
            if self.suspensions == self._at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            self.suspensions += 1
            try:
                yield waited
            except BaseException as error:
                resume = _throwing(inner, error)
            else:
                resume = inner.__next__


def _throwing(inner: Generator[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: inner.throw(error)


async def cancelled_at(awaited: Awaitable[Any], at: int) -> tuple[Any, bool]:
    """Its result and whether it got there, in a task of its own."""
    call = CancelledAt(awaited, at)

    async def run() -> Any:
        return await call

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    if task.cancelled():
        return None, False
    return task.result(), call.suspensions <= at


def sample(name: str) -> RolloutSample:
    return RolloutSample({"input_ids": np.arange(TOKENS)}, name)


def serve(folder: Path) -> ServeProcess:
    return ServeProcess(
        folder, warm=True, dp_size=1, global_batch_size=512, micro_batch_size=1,
        max_frame_bytes="64KiB",
    )  # fmt: skip


async def test_a_push_cancelled_at_any_await_costs_no_sample_and_no_credit(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        async with AsyncRolloutProducer(server.endpoint) as producer:
            certain = 0
            for at in count():
                names = [f"{at}-{index}" for index in range(3)]
                outcomes, whole = await cancelled_at(
                    producer.push_many([sample(name) for name in names]), at
                )
                if whole:
                    break
                assert not producer._client._waiting
                # Under ids of one's own it is safe to push again what may have been accepted.
                outcomes = await producer.push_many([sample(name) for name in names])
                assert set(outcomes) <= {Outcome.ACCEPTED, Outcome.DUPLICATE}
                certain += len(names)
            assert at >= 1, "a push waits for its answer"
            assert outcomes == [Outcome.ACCEPTED] * 3
        status = server.status()
        assert status["accepted"] == certain + 3
        assert status["balanced"]


@pytest.mark.parametrize("call", ["close_group", "end_phase"])
async def test_a_control_call_cancelled_at_any_await_leaves_a_working_producer(
    call: str, tmp_path: Path
) -> None:
    with serve(tmp_path) as server:
        async with AsyncRolloutProducer(server.endpoint) as producer:
            for at in count():
                awaited = (
                    producer.close_group("g") if call == "close_group" else producer.end_phase(1)
                )
                _, whole = await cancelled_at(awaited, at)
                assert not producer._client._waiting
                assert await producer.push_many([sample(f"s{at}")]) == [Outcome.ACCEPTED]
                if whole:
                    break
            assert at >= 1


async def test_a_start_cancelled_at_any_await_leaves_no_task_behind(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        for at in count():
            producer = AsyncRolloutProducer(server.endpoint)
            _, whole = await cancelled_at(producer.start(), at)
            if whole:
                break
            with pytest.raises(ClientClosed):
                await producer.push({"input_ids": [1]})
            await no_task_is_left()
        await producer.close()
        await no_task_is_left()


async def test_a_close_cancelled_at_any_await_closes_nevertheless(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        for at in count():
            producer = AsyncRolloutProducer(server.endpoint)
            await producer.start()
            _, whole = await cancelled_at(producer.close(), at)
            with pytest.raises(ClientClosed):
                await producer.push({"input_ids": [1]})
            await no_task_is_left()
            if whole:
                break
        assert at >= 2
        server.await_scrape(
            lambda found: found["connections_total{role=producer}"] == at + 1, "all were counted"
        )


async def no_task_is_left() -> None:
    """Every task of a producer ends, once it has heard that it is cancelled."""
    left = [task for task in asyncio.all_tasks() if task.get_name() == "rollout-producer"]
    if left:
        _, running = await asyncio.wait(left, timeout=10)
        assert not running
