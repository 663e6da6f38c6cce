"""A rollout producer as a user writes one, with several pushes under way at a time.

    python -m tests.bench.plane.producer '{"endpoint": "...", "load": "26k"}'

A run is a phase of on-policy training: when its samples are pushed the phase is ended, so that the
dispatcher holds nothing back for a fuller window, and the next run begins with an empty one. Its
samples are numpy arrays that exist before the clock starts; encoding them is part of the push.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

from tests.bench.plane.children import Answer, answer, arguments, orders_in_a_loop
from tests.bench.plane.loads import LOADS, Load
from workers import AsyncRolloutProducer, RolloutSample

#: Pushes under way: enough that the next is there when one is answered.
IN_FLIGHT = 4


class Pusher:
    """Pushes runs of one load, each from the start of its pool."""

    def __init__(self, producer: AsyncRolloutProducer, load: Load) -> None:
        self._producer, self._load = producer, load
        self._phase = 0
        self._pool = [RolloutSample(load.fields(index)) for index in range(load.pool)]

    async def run(self, count: int) -> Answer:
        """Push so many samples and wait until all are accepted; then end the phase."""
        self._pool = [replace(sample, policy_version=self._phase) for sample in self._pool]
        self._phase += 1
        began = time.monotonic()
        chunks = self._chunks(count)
        await asyncio.gather(*(self._push(chunks) for _ in range(IN_FLIGHT)))
        await self._producer.end_phase(self._phase)
        return {"began": began}

    async def _push(self, chunks: Iterator[list[RolloutSample]]) -> None:
        for chunk in chunks:
            await self._producer.push_many(chunk)

    def _chunks(self, count: int) -> Iterator[list[RolloutSample]]:
        size, pool = self._load.push, self._pool
        for first in range(0, count, size):
            yield [pool[at % len(pool)] for at in range(first, min(first + size, count))]


async def main() -> None:
    """Connect, and push when told."""
    given = arguments()
    async with AsyncRolloutProducer(given["endpoint"]) as producer:
        pusher = Pusher(producer, LOADS[given["load"]])
        answer(ready=True)
        async for order in orders_in_a_loop():
            if order["do"] == "end":
                break
            answer(**await pusher.run(order["count"]))
        await producer.end_stream()
    answer(ended=True)


if __name__ == "__main__":
    asyncio.run(main())
