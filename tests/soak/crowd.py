"""Many producers of a soak in one process: each pushes as fast as it may until it is killed.

    python -m tests.soak.crowd ENDPOINT HTTP FIRST LAST BALLAST

Producers FIRST to LAST - 1, each with a connection of its own, of five kinds in turn: one pushes
groups, one gives sample ids, one leaves for good every few pushes and comes back as somebody else,
one speaks HTTP, the others do nothing but push. Number 0 also ends a phase now and then, and
strangers come who push a little and hang up without a word. Lengths are real ones, scaled down;
BALLAST is bytes a token.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import numpy as np

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.sample import DType, Field, Schema
from rollout_dispatcher.simulate.trace import sample_lengths
from rollout_workers.demo.data import leave_with_starter
from rollout_workers.producer.encode import RolloutSample
from rollout_workers.producer.producer import AsyncRolloutProducer

AT_ONCE, KINDS = 32, 4096
SCALE = 1 / 256
GROUP = 16
#: Producers of the kind that leaves do so after this many pushes.
STAY = 50
#: An HTTP request has fewer samples: JSON is slow. It has a pause after each.
OVER_HTTP, HTTP_PAUSE_S = 4, 0.2
PHASE_S, STRANGER_S = 5.0, 0.2


class Maker:
    """Samples of one producer."""

    def __init__(self, number: int, ballast: int) -> None:
        self._number, self._ballast = number, ballast
        self._lengths = sample_lengths(
            "lineage", KINDS, np.random.default_rng(number), scale=SCALE
        ).tolist()
        self._serial = count()

    def fields(self, size: int) -> Iterator[dict[str, Any]]:
        """The fields of so many samples."""
        for at in (next(self._serial) for _ in range(size)):
            length = self._lengths[at % KINDS]
            ballast = np.full((length, self._ballast), at % 251, np.uint8)
            yield {"ballast": ballast, "input_ids": np.arange(length)}

    def plain(self) -> list[RolloutSample]:
        """Samples, and nothing else about them."""
        return [RolloutSample(fields) for fields in self.fields(AT_ONCE)]

    def named(self) -> list[RolloutSample]:
        """Samples whose ids are given."""
        return [
            RolloutSample(fields, f"{self._number}-{next(self._serial)}")
            for fields in self.fields(AT_ONCE)
        ]

    def grouped(self) -> list[RolloutSample]:
        """Whole groups, their members interleaved."""
        batch = f"{self._number}-{next(self._serial)}"
        groups = AT_ONCE // GROUP
        return [
            RolloutSample(fields, group_id=f"{batch}-{at % groups}", group_size=GROUP)
            for at, fields in enumerate(self.fields(AT_ONCE))
        ]


async def push(endpoint: str, make: Callable[[], list[RolloutSample]], *, stay: int) -> None:
    """Push for ever; a producer is somebody else after `stay` pushes."""
    while True:
        async with AsyncRolloutProducer(endpoint) as producer:
            for _ in range(stay):
                await producer.push_many(make())


async def push_over_http(address: str, maker: Maker) -> None:
    """Push for ever over HTTP, what finds no room again."""
    at = Endpoint.parse(address)
    reader, writer = await asyncio.open_connection(at.host, at.port)
    waiting: list[dict[str, object]] = []
    while True:
        if not waiting:
            waiting = [
                {"fields": {"ballast": {"dtype": "uint8", "data": fields["ballast"].tolist()},
                            "input_ids": fields["input_ids"].tolist()}}
                for fields in maker.fields(OVER_HTTP)
            ]  # fmt: skip
        body = json.dumps(waiting).encode()
        head = f"POST /v1/samples HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        said = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(said.split("content-length:")[1].split("\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        assert " 200 " in said[:20] or " 429 " in said[:20], (said, answer)
        waiting = [
            sample for sample, outcome in zip(waiting, answer["outcomes"], strict=True)
            if outcome == "full"
        ]  # fmt: skip
        await asyncio.sleep(HTTP_PAUSE_S)


async def end_phases(endpoint: str) -> None:
    """End a phase now and then, as a controller does."""
    async with AsyncRolloutProducer(endpoint) as producer:
        for version in count(1):
            await asyncio.sleep(PHASE_S)
            await producer.end_phase(version, force=True)


async def send_strangers(endpoint: str, ballast: int) -> None:
    """Clients that push two samples, wait for nothing and hang up."""
    at = Endpoint.parse(endpoint)
    schema = Schema(
        (Field("ballast", DType.UINT8, shape=(ballast,)), Field("input_ids", DType.INT64))
    )
    for number in count():
        await asyncio.sleep(STRANGER_S)
        name = f"stranger-{number}"
        _, writer = await asyncio.open_connection(at.host, at.port)
        push = m.Push(
            first_seq=0, floor=0, fields=m.field_headers(schema), tokens=[3, 5],
            loss_tokens=[2, 4], sample_ids=[f"{name}/0", f"{name}/1"],
        )  # fmt: skip
        nbytes = sum(schema.sizes([3, 5]))
        writer.write(codec.encode(m.HelloProducer(client_id=name)))
        await asyncio.sleep(0.05)  # its welcome comes first
        writer.write(codec.encode(push, nbytes) + bytes(nbytes))
        await asyncio.sleep(0.05)
        writer.transport.abort()


def work_of(endpoint: str, http: str, number: int, ballast: int) -> Awaitable[None]:
    """What this producer does."""
    maker = Maker(number, ballast)
    match number % 32:
        case 7:
            return push_over_http(http, maker)
        case kind if kind % 8 == 1:
            return push(endpoint, maker.grouped, stay=sys.maxsize)
        case kind if kind % 4 == 2:
            return push(endpoint, maker.named, stay=sys.maxsize)
        case kind if kind % 4 == 3:
            return push(endpoint, maker.plain, stay=STAY)
        case _:
            return push(endpoint, maker.plain, stay=sys.maxsize)


async def main(endpoint: str, http: str, first: int, last: int, ballast: int) -> None:
    """All of them, until the process is killed or one of them fails."""
    work = [work_of(endpoint, http, number, ballast) for number in range(first, last)]
    if first == 0:
        work += [end_phases(endpoint), send_strangers(endpoint, ballast)]
    await asyncio.gather(*work)


if __name__ == "__main__":
    leave_with_starter()
    where, web, *numbers = sys.argv[1:]
    low, high, weight = map(int, numbers)
    asyncio.run(main(where, web, low, high, weight))
