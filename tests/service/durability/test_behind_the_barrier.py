"""What waits for the journal when a client connects again is not for its new connection."""

import asyncio
from pathlib import Path

import numpy as np

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits, FrameReader
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.connections.peer import Peer, PeerLimits
from rollout_dispatcher.service.delivery.deliveries import HANDED_OUT_AT_ONCE
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.router import Router
from rollout_dispatcher.transport.sockets import listen
from tests.service.durability.test_barrier import SlowLog
from tests.support.listening import Heard
from tests.support.wire.frames import feed
from tests.support.wire.messages import IDS

LIMITS = FrameLimits(2**16, 2**16)


class Wire(asyncio.Transport):
    """A connection without a socket: keeps what the dispatcher writes."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._reader = FrameReader(LIMITS)
        self._heard: list[m.Message] = []
        self._more = asyncio.Event()
        self.peer = Peer(router, PeerLimits(LIMITS, 10, 10), asyncio.get_running_loop().time)
        self.peer.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        buffer = self._reader.get_buffer()
        buffer[: len(data)] = data
        self._heard += [codec.decode(frame) for frame in self._reader.received(len(data))]
        self._more.set()

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Nothing is in flight here."""

    def can_write_eof(self) -> bool:
        return False

    def say(self, message: m.Message, payload: bytes = b"") -> None:
        data = codec.encode(message, len(payload)) + payload
        while data:
            buffer = self.peer.get_buffer(-1)
            size = min(len(buffer), len(data))
            buffer[:size], data = data[:size], data[size:]
            self.peer.buffer_updated(size)

    async def hears(self, count: int) -> list[str]:
        """Wait for so many messages; their names."""
        while len(self._heard) < count:
            self._more.clear()
            await self._more.wait()
        return self.heard()

    async def hears_first(self, name: str) -> None:
        """Wait for a message of this name; it and what came before it are heard."""
        while name not in (names := [type(message).__name__ for message in self._heard]):
            self._more.clear()
            await self._more.wait()
        del self._heard[: names.index(name) + 1]

    def heard(self) -> list[str]:
        """The names of the messages since the last look."""
        return [type(message).__name__ for message in self.messages()]

    def messages(self) -> list[m.Message]:
        """The messages since the last look."""
        heard = self._heard.copy()
        self._heard.clear()
        return heard


def hub_with(log: SlowLog, dp_size: int = 1, samples: int = 1) -> Router:
    """A router whose steps have so many samples a rank; it is durable when the test says so."""
    config = ServeConfig(
        dp_size=dp_size, global_batch_size=dp_size * samples, micro_batch_size=1,
        journal_dir=Path("unused"),
    )  # fmt: skip
    clock = asyncio.get_running_loop().time
    core = DispatcherCore(core_config(config))
    return Router(config, core, Metrics(config, core, clock), clock, log)


def push_one(wire: Wire, seq: int = 0) -> None:
    tokens = np.arange(3, dtype=np.int64).tobytes()
    wire.say(
        m.Push(
            first_seq=seq, floor=0, fields=[IDS], tokens=[3], loss_tokens=[2],
            sample_ids=[f"s{seq}"],
        ),
        tokens,
    )  # fmt: skip


async def test_an_answer_is_not_given_to_a_connection_that_did_not_ask() -> None:
    log = SlowLog()
    router = hub_with(log)
    before, after = Wire(router), Wire(router)
    before.say(m.HelloProducer(client_id="p"))
    push_one(before)
    after.say(m.HelloProducer(client_id="p"))
    await log.durable(len(log.batches))
    assert after.heard() == ["WelcomeProducer"]
    push_one(after)
    await log.durable(len(log.batches))
    assert after.heard() == ["Pushed"]
    router.close()


async def test_a_rank_that_connects_again_is_welcomed_before_it_is_given_a_step() -> None:
    log = SlowLog()
    router = hub_with(log)
    before, after, producer = Wire(router), Wire(router), Wire(router)
    before.say(m.HelloRank(client_id="r", dp_rank=0, dp_size=1))
    await log.durable(len(log.batches))
    assert before.heard() == ["WelcomeRank"]
    before.say(m.Demand(taken=-1, hungry=True))
    producer.say(m.HelloProducer(client_id="p"))
    push_one(producer)
    await asyncio.sleep(0)  # the step is planned in the next turn
    after.say(m.HelloRank(client_id="r", dp_rank=0, dp_size=1, generation=1, hungry=True))
    await log.durable(len(log.batches))
    assert await after.hears(3) == ["WelcomeRank", "StepHeader", "MicroBatch"]
    router.close()


async def test_what_was_about_to_be_handed_out_is_not_for_a_rank_that_says_hello_again() -> None:
    log, parts = SlowLog(), HANDED_OUT_AT_ONCE + 1
    router = hub_with(log, samples=parts)
    rank, producer = Wire(router), Wire(router)
    rank.say(m.HelloRank(client_id="r", dp_rank=0, dp_size=1))
    producer.say(m.HelloProducer(client_id="p"))
    for seq in range(parts):
        push_one(producer, seq)
    await log.durable(len(log.batches))
    await asyncio.sleep(0)  # the step is planned in the next turn
    await log.durable(len(log.batches))
    assert rank.heard() == [
        "WelcomeRank",
        "StepHeader",
    ]  # so large a step is handed out a turn later
    position = m.CheckpointPosition(run_id="run", step=-1)
    rank.say(m.HelloRank(client_id="r", dp_rank=0, dp_size=1, generation=1, resume=position))
    await log.durable(len(log.batches))
    assert await rank.hears(2 + parts) == ["WelcomeRank", "StepHeader"] + ["MicroBatch"] * parts
    for _ in range(10):  # turns of the loop, in which more would come
        await asyncio.sleep(0)
    assert rank.heard() == []
    router.close()


class WatchedPeer(Peer):
    """Tells when it is held."""

    def __init__(self, router: Router) -> None:
        super().__init__(router, PeerLimits(LIMITS, 10, 10), asyncio.get_running_loop().time)
        self.was_held = asyncio.Event()

    def hold(self) -> None:
        super().hold()
        self.was_held.set()


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def test_a_flood_of_pings_is_not_read_while_nothing_becomes_durable(tmp_path: Path) -> None:
    log = SlowLog()
    router = hub_with(log)
    producer = Wire(router)
    producer.say(m.HelloProducer(client_id="p"))
    push_one(producer)  # a fact that no disk takes
    flooded = WatchedPeer(router)
    listening = listen(Endpoint(path=str(tmp_path / "socket")), Heard(lambda: flooded).handler)
    await listening.__aenter__()
    reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
    ping, count = codec.encode(m.Ping()), 50_000
    flood = asyncio.ensure_future(
        send(writer, codec.encode(m.HelloProducer(client_id="flood")) + ping * count)
    )
    held = asyncio.ensure_future(flooded.was_held.wait())
    await asyncio.wait({flood, held}, return_when=asyncio.FIRST_COMPLETED)
    assert not flood.done(), "all of it was read, and waits in memory"
    waiting = len(router.barrier._waiting)
    for _ in range(100):  # turns of the loop, in which a peer that is read from would be heard
        await asyncio.sleep(0)
    assert len(router.barrier._waiting) == waiting < count
    flooded.last_heard -= 10_000
    router.close_silent(0.0)  # it has no part in its silence

    durable = asyncio.ensure_future(log.durable(len(log.batches)))
    heard, names = FrameReader(LIMITS), list[str]()
    while data := await reader.read(65536):
        names += [type(codec.decode(frame)).__name__ for frame in feed(heard, data)]
        if len(names) == count + 1:
            break
    assert names == ["WelcomeProducer"] + ["Pong"] * count
    await asyncio.gather(flood, durable)
    writer.close()
    await listening.__aexit__(None, None, None)
    router.close()
