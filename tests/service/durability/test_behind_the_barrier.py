"""What waits for the journal when a client connects again is not for its new connection."""

import asyncio
from pathlib import Path

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.protocol.frame import FrameReader
from rollout_dispatcher.service.connections.peer import Peer
from rollout_dispatcher.service.delivery.deliveries import HANDED_OUT_AT_ONCE
from rollout_dispatcher.service.router import Router
from rollout_dispatcher.transport.sockets import listen
from tests.service.wires import LIMITS, SlowLog, Wire, make_router
from tests.support.listening import Heard
from tests.support.wire.frames import feed


async def test_an_answer_is_not_given_to_a_connection_that_did_not_ask() -> None:
    log = SlowLog()
    router = make_router(log)
    before = Wire(router, m.HelloProducer(client_id="p"))
    before.push_one()
    after = Wire(router, m.HelloProducer(client_id="p"))
    await log.durable()
    assert after.heard() == ["WelcomeProducer"]
    after.push_one()
    await log.durable()
    assert after.heard() == ["Pushed"]
    router.close()


async def test_a_rank_that_connects_again_is_welcomed_before_it_is_given_a_step() -> None:
    log = SlowLog()
    router = make_router(log)
    before = Wire(router, m.HelloRank(client_id="r", dp_rank=0, dp_size=1))
    await log.durable()
    assert before.heard() == ["WelcomeRank"]
    before.say(m.Demand(taken=-1, hungry=True))
    Wire(router, m.HelloProducer(client_id="p")).push_one()
    await asyncio.sleep(0)  # the step is planned in the next turn
    hello = m.HelloRank(client_id="r", dp_rank=0, dp_size=1, generation=1, hungry=True)
    after = Wire(router, hello)
    await log.durable()
    assert await after.hears(3) == ["WelcomeRank", "StepHeader", "MicroBatch"]
    router.close()


async def test_what_was_about_to_be_handed_out_is_not_for_a_rank_that_says_hello_again() -> None:
    log, parts = SlowLog(), HANDED_OUT_AT_ONCE + 1
    router = make_router(log, global_batch_size=parts)
    rank = Wire(router, m.HelloRank(client_id="r", dp_rank=0, dp_size=1))
    producer = Wire(router, m.HelloProducer(client_id="p"))
    for seq in range(parts):
        producer.push_one(seq)
    await log.durable()
    await asyncio.sleep(0)  # the step is planned in the next turn
    await log.durable()
    # So large a step is handed out a turn later.
    assert rank.heard() == ["WelcomeRank", "StepHeader"]
    position = m.CheckpointPosition(run_id="run", step=-1)
    rank.say(m.HelloRank(client_id="r", dp_rank=0, dp_size=1, generation=1, resume=position))
    await log.durable()
    assert await rank.hears(2 + parts) == ["WelcomeRank", "StepHeader"] + ["MicroBatch"] * parts
    for _ in range(10):  # turns of the loop, in which more would come
        await asyncio.sleep(0)
    assert rank.heard() == []
    router.close()


class WatchedPeer(Peer):
    """Tells when it is held."""

    def __init__(self, router: Router) -> None:
        super().__init__(router, LIMITS, asyncio.get_running_loop().time)
        self.was_held = asyncio.Event()

    def hold(self) -> None:
        super().hold()
        self.was_held.set()


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def test_a_flood_of_pings_is_not_read_while_nothing_becomes_durable(tmp_path: Path) -> None:
    log = SlowLog()
    router = make_router(log)
    Wire(router, m.HelloProducer(client_id="p")).push_one()  # a fact that no disk takes
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
    flooded.last_received -= 10_000
    router.close_silent(0.0)  # it has no part in its silence

    durable = asyncio.ensure_future(log.durable())
    heard, names = FrameReader(LIMITS.frame), list[str]()
    while data := await reader.read(65536):
        names += [type(codec.decode(frame)).__name__ for frame in feed(heard, data)]
        if len(names) == count + 1:
            break
    assert names == ["WelcomeProducer"] + ["Pong"] * count
    await asyncio.gather(flood, durable)
    writer.close()
    await listening.__aexit__(None, None, None)
    router.close()
