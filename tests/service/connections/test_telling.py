"""Where the trainer is, told to many producers, and to one that does not read."""

import asyncio
from collections.abc import Callable
from functools import partial

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.feedback import PRODUCERS_A_TURN
from rollout_dispatcher.service.router import Router
from tests.service.wires import Wire, make_router


class Listener(Wire):
    """A producer that is told where the trainer is."""

    def __init__(self, router: Router, name: str) -> None:
        super().__init__(router, m.HelloProducer(client_id=name, feedback=True))
        self.sent = b""

    def is_told(self, version: int) -> bool:
        """Whether it was told of this version since this was asked last."""
        said, self.sent = self.sent, b""
        return said.count(b'"policy_version":%d' % version) == 1


def report(router: Router, version: int) -> None:
    """DP rank 0 trains other weights."""
    router.perform(router.core.set_policy_version(version, router.clock(), 0))


async def until(true: Callable[[], bool]) -> None:
    """Let the event loop turn."""
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110  # nothing tells a connection that is memory
            await asyncio.sleep(0)


async def test_thousands_are_told_in_turns_and_others_come_in_between() -> None:
    router = make_router(receive_bytes=2**16)
    everybody = [Listener(router, f"p{at}") for at in range(5 * PRODUCERS_A_TURN)]
    report(router, 3)
    told = [0]
    while told[-1] < len(everybody):
        await asyncio.sleep(0)
        told.append(sum(bool(one.sent) for one in everybody))
        assert told[-1] - told[-2] <= PRODUCERS_A_TURN
    assert all(one.is_told(3) for one in everybody)
    report(router, 4)  # also to those who come while others are told
    await until(lambda: bool(everybody[0].sent))
    report(router, 5)
    await until(lambda: all(b'"policy_version":5' in one.sent for one in everybody))
    router.close()


async def test_who_does_not_read_is_told_once_it_has() -> None:
    router = make_router(receive_bytes=2**16)
    reader, other = Listener(router, "reader"), Listener(router, "other")
    other.peer.pause_writing()
    for version in (3, 4, 5):
        report(router, version)
        await until(partial(reader.is_told, version))
        assert other.sent == b""
    other.peer.resume_writing()
    await until(lambda: bool(other.sent))
    assert other.is_told(5)
    router.close()
