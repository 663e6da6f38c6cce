"""A real router, real connections whose transports are memory, a journal whose disk is the test."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.facts import Accepted, Fact
from rollout_dispatcher.errors import JournalError
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits, FrameReader
from rollout_dispatcher.service.config.serve import ServeConfig, core_config
from rollout_dispatcher.service.connections.peer import Peer, PeerLimits
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.planes import http_plane
from rollout_dispatcher.service.router import Router
from tests.support.client import make_push
from tests.support.samples import span_of
from tests.support.wire.frames import feed

LIMITS = PeerLimits(FrameLimits(1 << 20, 1 << 20), 10.0, 10.0)


class SlowLog:
    """A journal whose disk is the test: batches are durable when it says so."""

    def __init__(self) -> None:
        self.on_durable: Callable[[int], None] = lambda _: None
        self.on_broken: Callable[[JournalError], None] = lambda _: None
        self.on_capacity: Callable[[], None] = lambda: None
        self.free, self.asked = sys.maxsize, 0
        self.appended = asyncio.Event()
        self.failure: JournalError | None = None
        self.batches: list[tuple[Sequence[Fact], Mapping[str, object]]] = []

    def append(self, facts: Sequence[Fact], totals: Mapping[str, object]) -> int:
        self.batches.append((facts, totals))
        self.appended.set()
        return len(self.batches)

    def capacity(self, wanted: int = 0) -> int:
        """What the test says, to whatever was asked."""
        self.asked = wanted
        return self.free

    def fetch(self, ticket: int) -> bytes:
        """The payload as it was appended."""
        accepted = (fact for facts, _ in self.batches for fact in facts)
        return next(
            span_of(fact.entry.sample).tobytes()
            for fact in accepted
            if isinstance(fact, Accepted) and fact.entry.ticket == ticket
        )

    async def durable(self, lsn: int | None = None) -> None:
        """All up to a batch: report from another thread, as a journal does, and let the loop hear.

        lsn: None for everything that was appended.
        """
        await told(self.on_durable, len(self.batches) if lsn is None else lsn)


async def told(report: Callable[..., None], *facts: object) -> None:
    """Say something from another thread, and let the loop hear of it."""
    thread = threading.Thread(target=report, args=facts)
    thread.start()
    thread.join()
    await asyncio.sleep(0)


def make_router(
    log: SlowLog | None = None, clock: Callable[[], float] | None = None, **options: Any
) -> Router:
    """For one rank and steps of one sample unless told otherwise."""
    few: dict[str, Any] = {"dp_size": 1, "global_batch_size": 1, "micro_batch_size": 1}
    journal = {} if log is None else {"journal_dir": Path("unused")}
    config = ServeConfig(**few | journal | options)
    clock = clock or asyncio.get_running_loop().time
    core = DispatcherCore(core_config(config))
    return Router(config, core, Metrics(config, core, clock), clock, log)


@asynccontextmanager
async def http_client(router: Router) -> AsyncIterator[ClientSession]:
    """A client of the HTTP plane over this router."""
    config = router.config.model_copy(update={"http": Endpoint.parse("127.0.0.1:0")})
    async with (
        http_plane(config, router) as at,
        ClientSession(f"http://{at.host}:{at.port}") as client,
    ):
        yield client


class Wire(asyncio.Transport):
    """A connection without a socket: whether it is read from and closed, and what its client hears.

    said: what the client says at once.
    """

    def __init__(self, router: Router, *said: m.Message) -> None:
        super().__init__()
        self.reading, self.lost, self.sent = True, False, b""
        self._reader = FrameReader(LIMITS.frame)
        self._heard: list[m.Message] = []
        self._more = asyncio.Event()
        self.peer = Peer(router, LIMITS, router.clock)
        self.peer.connection_made(self)
        for message in said:
            self.say(message)

    # -- the client

    def say(self, message: m.Message, payload: bytes = b"") -> None:
        self.arrives(codec.encode(message, len(payload)) + payload)

    def push_one(self, seq: int = 0) -> None:
        """A sample, as `p/seq`."""
        self.say(*make_push("p", seq, [3]))

    def announces_a_push(self) -> bytes:
        """A push begins that is large, and finds no room while another is received; its payload."""
        push, payload = make_push("p", 0, [10_000])
        self.arrives(codec.encode(push, len(payload)))
        return payload

    def arrives(self, data: bytes) -> None:
        """Bytes from the client: as many as are read."""
        while data and self.reading:
            target = self.peer.get_buffer(-1)
            taken = min(len(target), len(data))
            target[:taken], data = data[:taken], data[taken:]
            self.peer.buffer_updated(taken)
        assert not data, "more than is read"

    def lose(self) -> None:
        """The connection is lost."""
        self.lost = True
        self.peer.connection_lost(None)

    def messages(self) -> list[m.Message]:
        """What the client heard since the last look."""
        heard = self._heard.copy()
        self._heard.clear()
        return heard

    def heard(self) -> list[str]:
        """The names of these."""
        return [type(message).__name__ for message in self.messages()]

    def errors(self) -> list[str]:
        """The codes of the errors among them."""
        return [message.code for message in self.messages() if isinstance(message, m.Error)]

    async def hears(self, count: int) -> list[str]:
        """Wait for so many messages; their names."""
        while len(self._heard) < count:
            self._more.clear()
            await self._more.wait()
        return self.heard()

    # -- the transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data
        self._heard += [codec.decode(frame) for frame in feed(self._reader, bytes(data))]
        self._more.set()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.lost

    def close(self) -> None:
        self.lost = True

    def abort(self) -> None:
        self.lost = True


class TwoRanks:
    """A router of two ranks whose journal is durable when the test says so."""

    def __init__(self) -> None:
        self.log = SlowLog()
        self.router = make_router(self.log, dp_size=2, global_batch_size=2)
        self.producer = Wire(self.router, m.HelloProducer(client_id="p"))
        self._pushed = 0

    async def durable(self) -> None:
        """Everything that was noted is on the disk, and what follows from it was said."""
        while True:
            noted = len(self.log.batches)
            await self.log.durable()
            await asyncio.sleep(0.01)  # a plan waits a turn, a delivery two
            if len(self.log.batches) == noted:
                return

    def hello(self, dp_rank: int, generation: int | None, client_id: str, **more: object) -> Wire:
        """A rank says hello on a new connection."""
        facts = {"client_id": client_id, "dp_rank": dp_rank, "dp_size": 2, "generation": generation}
        return Wire(self.router, m.HelloRank.model_validate(facts | more))

    async def joined(self, dp_rank: int, generation: int | None, client_id: str) -> Wire:
        """A rank that is welcome, and asks for a step."""
        wire = self.hello(dp_rank, generation, client_id)
        await self.durable()
        wire.say(m.Demand(taken=-1, hungry=True))
        return wire

    async def old_group(self) -> tuple[Wire, Wire]:
        """Two ranks of generation 1 that hold step 0."""
        ranks = await self.joined(0, None, "old-0"), await self.joined(1, 1, "old-1")
        self.push_a_step()
        await self.durable()
        for rank in ranks:
            assert rank.heard() == ["WelcomeRank", "StepHeader", "MicroBatch"]
        return ranks

    def push_a_step(self) -> None:
        for _ in range(2):
            self.producer.push_one(self._pushed)
            self._pushed += 1

    @property
    def digest(self) -> str:
        """Of step 0."""
        step = self.router.core.step(0)
        assert step is not None
        return step.digest
