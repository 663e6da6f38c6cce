"""One connection, plain and over TLS: nothing that arrives is left lying, nothing said is lost."""

import asyncio
import gc
import selectors
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
from numpy.typing import NDArray

from rollout_dispatcher import errors
from rollout_dispatcher.errors import (
    DispatcherError,
    DispatcherUnreachable,
    ProtocolError,
    RankRefused,
)
from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameLimits, FrameReader
from rollout_dispatcher.protocol.sessions import Side
from rollout_dispatcher.sample import Outcome
from rollout_dispatcher.transport.sockets import connect
from rollout_workers.client.link import Link, error_message, restored
from rollout_workers.client.role import Outgoing, Role
from rollout_workers.producer.producer import RolloutProducer
from rollout_workers.rank.client import RankClient
from tests.support.certificates import Authority
from tests.support.server import eventually
from tests.support.wire.frames import feed
from tests.workers.support.peers import ScriptedDispatcher, producer_welcome, step

LIMITS = FrameLimits(1 << 20, 1 << 26)
PATIENCE_S = 20.0
WELCOME = producer_welcome()
#: The beginning of a micro-batch.
LARGE_FRAME = codec.encode(
    m.MicroBatch(step=0, index=0, tokens=[1], loss_tokens=[1], sample_ids=["a"]), 1 << 24
) + bytes(1 << 10)


class Words:
    """A core that says what it is given and remembers what it hears."""

    finished, unconfirmed = False, None

    def __init__(self) -> None:
        self.token: str | None = None
        self.to_say: list[m.Message] = []
        self.payload = b""  # of each
        self.arrived: list[m.Message] = []
        self.news = asyncio.Event()
        self.wait_s: float | None = None

    def hello(self) -> m.HelloProducer:
        return m.HelloProducer(client_id="me")

    def receive(self, message: m.Message, payload: memoryview, now: float) -> None:  # noqa: ARG002
        self.arrived.append(message)

    def take_messages(self, now: float) -> Iterable[Outgoing]:  # noqa: ARG002
        while self.to_say:
            yield self.to_say.pop(0), (self.payload,) if self.payload else ()

    def take_answers(self) -> Iterable[Outgoing]:
        return ()

    def ping(self) -> m.Ping:
        return m.Ping()

    def wait(self, now: float) -> float | None:  # noqa: ARG002
        return self.wait_s

    def lost(self) -> None:
        """Nothing is said again."""

    async def hears(self, count: int) -> Sequence[m.Message]:
        """The first so many messages."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.arrived) < count:
                self.news.clear()
                await self.news.wait()
        return self.arrived


class Other:
    """The dispatcher's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames, self._arrived = FrameReader(LIMITS), list[m.Message]()

    async def next(self) -> m.Message:
        """The next message of the client."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._arrived:
                data = await self._reader.read(1 << 16)
                assert data, "the client hung up"
                self._arrived += map(codec.decode, feed(self._frames, data))
        return self._arrived.pop(0)

    def send(self, *frames: bytes) -> None:
        """Write all of it at once."""
        self._writer.write(b"".join(frames))

    def hang_up(self) -> None:
        self._writer.close()


Ends = tuple[Link, Words, Other]


@asynccontextmanager
async def joined(folder: Path, way: str) -> AsyncIterator[Ends]:
    """A link that is welcomed, its core, and its other end."""
    found: asyncio.Future[Other] = asyncio.get_running_loop().create_future()
    serving, trusted = None, None
    if way == "tls":
        authority = Authority(folder)
        pair = authority.issue("127.0.0.1")
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(pair.certificate, pair.key)
        trusted = authority.client()
    server = await asyncio.start_server(
        lambda reader, writer: found.set_result(Other(reader, writer)),
        "127.0.0.1", 0, ssl=serving,
    )  # fmt: skip
    core = Words()
    role, loop = Role(core, Side.PRODUCER, LIMITS, core.news.set), asyncio.get_running_loop()
    link = Link(role, loop)
    port = server.sockets[0].getsockname()[1]
    await connect(Endpoint("127.0.0.1", port, tls=way == "tls"), link, trusted)
    other = await found
    assert isinstance(await other.next(), m.HelloProducer)
    other.send(codec.encode(WELCOME))
    await link.welcomed
    try:
        yield link, core, other
    finally:
        link.abort()
        other.hang_up()
        server.close()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([link.ended])


@pytest.fixture(params=["tcp", "tls"])
async def ends(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    async with joined(tmp_path, request.param) as found:
        yield found


class Poll(selectors.DefaultSelector):
    """The poll of a process that is stopped (SIGSTOP) in it, if `stopped` is set, while that runs.

    Once the process goes on, the time of the poll is up, and it returns nothing of what has come.
    """

    stopped: Callable[[], None] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.stopped is None or timeout == 0:
            return super().select(timeout)
        meanwhile, self.stopped = self.stopped, None
        meanwhile()
        return []


def test_a_process_that_was_stopped_reads_what_came_meanwhile_before_it_gives_up() -> None:
    poll, accepted = Poll(), list[socket.socket]()
    server = socket.create_server(("127.0.0.1", 0))

    class Stopped(Words):
        """Its process is stopped when it has said Ping, until after the answer has come."""

        def ping(self) -> m.Ping:
            poll.stopped = self.stopped
            return super().ping()

        def stopped(self) -> None:
            accepted[0].sendall(codec.encode(m.Pong()))
            sleep(0.3)

    async def run() -> None:
        core, loop = Stopped(), asyncio.get_running_loop()
        link = Link(Role(core, Side.PRODUCER, LIMITS, core.news.set), loop)
        await connect(Endpoint("127.0.0.1", server.getsockname()[1]), link, None)
        accepted.append(server.accept()[0])
        accepted[0].sendall(codec.encode(producer_welcome(heartbeat_interval_s=0.1)))
        await link.welcomed
        until = loop.create_future()
        watching = asyncio.ensure_future(link.watch(until))
        assert m.Pong() in await core.hears(2)
        until.set_result(None)
        await watching
        link.abort()

    with server, asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(poll)) as runner:
        runner.run(run())
    accepted[0].close()


async def test_a_small_frame_right_behind_a_large_one_is_not_waited_for(ends: Ends) -> None:
    _, core, other = ends
    large = m.Pushed(first_seq=0, outcomes=[Outcome.REFUSED], errors={"0": "x" * 200_001})
    other.send(codec.encode(large), codec.encode(m.Pong()))
    assert await core.hears(3) == [WELCOME, large, m.Pong()]


async def test_what_a_slow_dispatcher_has_no_room_for_waits_in_the_core(ends: Ends) -> None:
    link, core, other = ends
    count = 200
    core.to_say, core.payload = [m.Ping() for _ in range(count)], bytes(1 << 16)
    link.pump()
    assert core.to_say, "it was written though nobody reads"
    for _ in range(count):
        assert await other.next() == m.Ping()
    assert not core.to_say


async def test_a_goodbye_comes_after_all_that_was_said_and_needs_an_answer(ends: Ends) -> None:
    link, core, other = ends
    core.to_say = [m.EndStream()]
    leaving = asyncio.create_task(link.acknowledge_bye())
    assert await other.next() == m.EndStream()
    assert await other.next() == m.Bye()
    core.to_say = [m.EndStream()]
    other.send(codec.encode(m.Pong()))
    await core.hears(2)
    link.pump()
    assert core.to_say, "it was said after the goodbye"
    assert not leaving.done()
    other.send(codec.encode(m.Bye()))
    async with asyncio.timeout(PATIENCE_S):
        await leaving


async def test_what_came_before_a_refusal_is_heard(ends: Ends) -> None:
    link, core, other = ends
    refusal = m.Error(code=RankRefused.code, message="taken")
    other.send(codec.encode(m.Pong()), codec.encode(refusal))
    with pytest.raises(RankRefused, match="taken"):
        async with asyncio.timeout(PATIENCE_S):
            await link.ended
    assert core.arrived == [WELCOME, m.Pong()]


async def test_bytes_that_are_no_frame_end_the_connection(ends: Ends) -> None:
    link, _, other = ends
    other.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ProtocolError, match="expected a frame"):
        async with asyncio.timeout(PATIENCE_S):
            await link.ended


def receive(link: Link, frame: bytes) -> None:
    """As the transport does; the core hears of it in the next turn of the event loop."""
    link.get_buffers()[0][: len(frame)] = frame
    link.buffer_updated(len(frame))


async def test_nothing_is_said_once_a_refusal_is_here_though_the_core_has_not_heard_it(
    ends: Ends,
) -> None:
    link, core, _ = ends
    receive(link, codec.encode(m.Error(code=RankRefused.code, message="taken")))
    core.to_say = [m.EndStream()]
    link.pump()
    assert core.to_say, "it counts as said"
    with pytest.raises(RankRefused, match="taken"):
        async with asyncio.timeout(PATIENCE_S):
            await link.acknowledge_bye()


async def test_what_arrived_on_a_connection_that_was_dropped_is_not_heard(ends: Ends) -> None:
    link, core, _ = ends
    receive(link, codec.encode(m.Pong()))
    link.abort()
    with pytest.raises(ConnectionError):
        await link.ended
    for _ in range(3):
        await asyncio.sleep(0)
    assert core.arrived == [WELCOME]


async def test_what_is_due_sooner_does_not_wait_for_what_is_due_later(ends: Ends) -> None:
    link, core, other = ends
    core.wait_s = 10 * PATIENCE_S
    link.pump()
    core.wait_s = 0.01
    link.pump()
    core.to_say = [m.EndStream()]
    assert await other.next() == m.EndStream()


def test_what_a_lost_connection_had_of_a_frame_goes_at_once(dispatcher: ScriptedDispatcher) -> None:
    made: list[weakref.ref[NDArray[np.uint8]]] = []

    def memory(nbytes: int) -> memoryview:
        payload = np.empty(nbytes, np.uint8)
        made.append(weakref.ref(payload))
        return payload.data

    gc.collect()
    gc.disable()  # as trainers do
    try:
        make = partial(RankClient, dp_rank=0, dp_size=2, memory=memory)
        _, peer = dispatcher.join(make)
        peer.send(step(0))
        peer.send_bytes(LARGE_FRAME)
        eventually(lambda: made, "it begins to come")
        peer.close()
        dispatcher.accept()
        eventually(lambda: made[0]() is None, "the payload is freed")
    finally:
        gc.enable()


@pytest.mark.parametrize("begin", [RolloutProducer, partial(RankClient, dp_rank=0, dp_size=1)])
def test_who_is_never_answered_gives_up_when_it_was_told_to(begin: Callable[..., object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = monotonic()
        with pytest.raises(DispatcherUnreachable, match="did not answer the HELLO"):
            begin("{}:{}".format(*mute.getsockname()), reconnect_timeout=0.5)
        assert monotonic() - began < 5


# -- errors, as another process tells them


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DispatcherError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_comes_back_with_its_class_and_text(kind: type[DispatcherError]) -> None:
    error = kind.__new__(kind, "what was found")
    Exception.__init__(error, "what was found")
    again = restored(error_message(error))
    assert type(again) is kind
    assert str(again) == "what was found"


def test_what_is_none_of_ours_goes_by_its_name() -> None:
    again = restored(error_message(OSError("no room")))
    assert type(again) is DispatcherError
    assert str(again) == "OSError: no room"


def test_a_code_that_is_not_known_is_an_error_all_the_same() -> None:
    message = error_message(DispatcherError("x")).model_copy(update={"code": "of a newer release"})
    assert type(restored(message)) is DispatcherError
