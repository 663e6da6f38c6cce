"""A rollout producer as a user writes one, with several pushes under way at a time.

    python -m tests.bench.plane.children.producer '{"endpoint": "...", "load": "26k"}'

A run is a phase of on-policy training: when its samples are pushed the phase is ended, so that the
dispatcher holds nothing back for a fuller window, and the next run begins with an empty one. Its
samples are numpy arrays that exist before the clock starts; encoding them is part of the push.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

from rollout_workers import AsyncRolloutProducer, RolloutSample
from tests.bench.plane.children.children import Answer, answer, arguments, orders_in_a_loop
from tests.bench.plane.load.loads import Load, find

#: Pushes under way: enough that the next is there when one is answered.
IN_FLIGHT = 4


class Pusher:
    """Pushes runs of one load, each from the start of its pool, through one or many producers."""

    def __init__(self, producers: list[AsyncRolloutProducer], load: Load) -> None:
        self._producers, self._load = producers, load
        self._phase = 0
        self._pool = [RolloutSample(load.fields(index)) for index in range(load.pool)]

    async def run(self, count: int) -> Answer:
        """Push so many samples, wait until all are accepted, and end the phase."""
        self._pool = [replace(sample, policy_version=self._phase) for sample in self._pool]
        self._phase += 1
        began = time.monotonic()
        await self.fill(count)
        await self._producers[0].end_phase(self._phase)
        return {"began": began}

    async def fill(self, count: int) -> Answer:
        """Push so many samples and wait until all are accepted."""
        chunks = self._chunks(count)
        workers = [self._push(it, chunks) for it in self._producers for _ in range(IN_FLIGHT)]
        await asyncio.gather(*workers)
        return {}

    async def pace(self, rate: float) -> Answer:
        """Push one run at `rate` bytes a second; tells when each push began.

        A push is begun when it is due, whether those before it are answered or not.
        """
        loop, pushed = asyncio.get_running_loop(), []
        due = loop.time()
        async with asyncio.TaskGroup() as pushes:
            for chunk, nbytes in zip(
                self._chunks(self._load.samples), self._push_bytes(), strict=True
            ):
                await asyncio.sleep(max(0.0, due - loop.time()))
                due += nbytes / rate
                pushed.append(time.monotonic())
                pushes.create_task(self._producers[0].push_many(chunk))
        return {"pushed": pushed}

    def _push_bytes(self) -> Iterator[int]:
        load = self._load
        for first in range(0, load.samples, load.push):
            members = [at % load.pool for at in range(first, first + load.push)]
            yield int(load.nbytes[members].sum())

    @staticmethod
    async def _push(producer: AsyncRolloutProducer, chunks: Iterator[list[RolloutSample]]) -> None:
        for chunk in chunks:
            await producer.push_many(chunk)

    def _chunks(self, count: int) -> Iterator[list[RolloutSample]]:
        size, pool = self._load.push, self._pool
        for first in range(0, count, size):
            yield [pool[at % len(pool)] for at in range(first, min(first + size, count))]


async def main() -> None:
    """Connect, and push when told."""
    given = arguments()
    async with AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(AsyncRolloutProducer(given["endpoint"]))
            for _ in range(given.get("producers", 1))
        ]
        pusher = Pusher(producers, find(given))
        work: dict[str, Callable[..., Awaitable[Answer]]] = {
            "run": pusher.run,
            "fill": pusher.fill,
            "pace": pusher.pace,
        }
        answer(ready=True)
        async for order in orders_in_a_loop():
            if order["do"] == "end":
                break
            answer(**await work[order.pop("do")](**order))
        await producers[0].end_stream()
    answer(ended=True)


if __name__ == "__main__":
    asyncio.run(main())
