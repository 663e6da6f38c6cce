r"""A dispatcher that decides nothing: between the raw relay and ours, to tell bytes from decisions.

    python -m tests.bench.plane.children.held \
        '{"load": "26k", "steps": 80, "hold": 320, "ports": [...]}'

The dispatcher's own transport receives each sample into memory of its own, holds a window of them,
and sends the oldest on in micro-batches, field by field, to either receiver in turn. There is no
message, duplicate, plan, answer, release or commit, and both ends are those of the raw relay.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from itertools import islice

from rollout_dispatcher.transport.memory import uninitialised
from rollout_dispatcher.transport.plain import StreamProtocol, StreamTransport
from tests.bench.plane.children.children import Answer, answer, arguments
from tests.bench.plane.load.loads import PLAIN_FIELD_BYTES, Load, find


class Receiver(StreamProtocol):
    """Takes micro-batches while its peer reads."""

    def __init__(self, load: Load) -> None:
        self._units = [*PLAIN_FIELD_BYTES, 2 * load.shape.width]
        self._token_bytes = load.shape.token_bytes
        self._waiting: deque[list[memoryview]] = deque()
        self._paused = False
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        while self._waiting and not self._paused:
            self._transport.writelines(self._gathered(self._waiting.popleft()))

    def send(self, samples: list[memoryview]) -> None:
        """Send a micro-batch once there is room for it."""
        self._waiting.append(samples)
        if not self._paused:
            self.resume_writing()

    def _gathered(self, samples: Sequence[memoryview]) -> list[memoryview]:
        buffers: list[memoryview] = []
        starts = [0] * len(samples)
        tokens = [len(sample) // self._token_bytes for sample in samples]
        for unit in filter(None, self._units):
            stops = [start + unit * count for start, count in zip(starts, tokens, strict=True)]
            buffers += map(lambda it, a, b: it[a:b], samples, starts, stops)
            starts = stops
        return buffers


class Sender(StreamProtocol):
    """Receives the samples of run after run; all that is held goes at the end of each."""

    def __init__(self, load: Load, hold: int, receivers: Sequence[Receiver]) -> None:
        self._load, self._hold, self._receivers = load, hold, receivers
        self._allocated = self._received = self._turn = self._filled = 0
        self._missing: deque[memoryview] = deque()
        self._held: deque[memoryview] = deque()
        self.gone = asyncio.get_running_loop().create_future()

    def get_buffers(self) -> list[memoryview]:
        while len(self._missing) < self._load.push:
            at = self._allocated % self._load.samples % self._load.pool
            self._missing.append(uninitialised(int(self._load.nbytes[at])))
            self._allocated += 1
        found = list(islice(self._missing, self._load.push))
        found[0] = found[0][self._filled :]
        return found

    def buffer_updated(self, nbytes: int) -> None:
        nbytes += self._filled
        while self._missing and nbytes >= len(self._missing[0]):
            sample = self._missing.popleft()
            nbytes -= len(sample)
            self._held.append(sample)
            self._received += 1
        self._filled = nbytes
        size = self._load.micro_batch
        hold = self._hold if self._received % self._load.samples else 0
        while len(self._held) >= hold + size:
            samples = [self._held.popleft() for _ in range(size)]
            self._receivers[self._turn % len(self._receivers)].send(samples)
            self._turn += 1

    def eof_received(self) -> bool:
        self.gone.set_result(None)
        return True


async def relay(given: Answer) -> None:
    """Accept one sender, connect to the receivers, and pass on until the sender is gone."""
    load, loop = find(given), asyncio.get_running_loop()
    receivers = [Receiver(load) for _ in given["ports"]]
    for receiver, port in zip(receivers, given["ports"], strict=True):
        StreamTransport(loop, socket.create_connection(("127.0.0.1", port)), receiver)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer(port=listener.getsockname()[1])
        connection, _ = await loop.run_in_executor(None, listener.accept)
    sender = Sender(load, given["hold"], receivers)
    StreamTransport(loop, connection, sender)
    await sender.gone


if __name__ == "__main__":
    asyncio.run(relay(arguments()))
