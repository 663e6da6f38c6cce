"""Claims about turns of the event loop: short, and everybody gets one."""

import asyncio
import selectors
import socket
from collections import Counter
from collections.abc import Iterator
from time import monotonic

import pytest

from rollout_dispatcher.transport.turns import AT_ONCE, FairEventLoop, FairSelector, Turns

MANY = 3 * AT_ONCE + 5


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(MANY)]
    yield made
    for ends in made:
        for end in ends:
            end.close()


def test_every_ready_socket_gets_its_turn_even_if_none_ever_becomes_quiet(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    with FairSelector(Turns(monotonic)) as selector:
        for number, (ours, theirs) in enumerate(pairs):
            selector.register(ours, selectors.EVENT_READ, number)
            theirs.send(b"x")
        served = Counter[int]()
        for _ in range(2 * MANY):
            turn = [key.data for key, _ in selector.select(0)]
            assert len(turn) == len(set(turn)) == AT_ONCE
            served.update(turn)
        assert set(served) == set(range(MANY))
        assert max(served.values()) - min(served.values()) <= 1


def test_what_is_due_comes_between_the_turns(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    order: list[int | str] = []

    async def speak_all_at_once() -> None:
        loop, all_heard = asyncio.get_running_loop(), asyncio.Event()

        def heard(number: int, end: socket.socket) -> None:
            order.append(number)
            end.recv(1)
            if len(order) > MANY:
                all_heard.set()

        for number, (ours, theirs) in enumerate(pairs):
            loop.add_reader(ours, heard, number, ours)
            theirs.send(b"x")
        loop.call_later(0, order.append, "due")
        await asyncio.wait_for(all_heard.wait(), 20)
        for ours, _ in pairs:
            loop.remove_reader(ours)

    with asyncio.Runner(loop_factory=FairEventLoop) as runner:
        runner.run(speak_all_at_once())
    assert order.index("due") <= AT_ONCE
    assert len(set(order)) == MANY + 1
