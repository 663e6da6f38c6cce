"""Pending connections: a bound, an order, and a time that nobody takes from them."""

import asyncio

from rollout_dispatcher.transport.listener import BACKLOG, BACKLOG_SECONDS, Pending, Place

LIMIT = 4


class Crowd:
    """Connections that enter and are ended, by hand or by `pending`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pending = Pending(LIMIT, lambda: self.now)
        self.ended: list[str] = []
        self.calls = 0

    def enter(self, name: str) -> Place:
        place = self.pending.enter(lambda: self.ended.append(name))
        self.now += self.pending.grace / 100
        return place

    def fill(self) -> list[Place]:
        return [self.enter(name) for name in "abcd"]

    def wait(self) -> None:
        self.pending.when_free(self.call)

    def call(self) -> None:
        self.calls += 1


async def turn() -> None:
    await asyncio.sleep(0)


def test_a_backlog_that_strangers_have_filled_is_through_in_a_time_whatever_the_bound() -> None:
    for limit in (1, 24, 512, 4096):
        assert limit / Pending(limit, lambda: 0.0).grace * BACKLOG_SECONDS == BACKLOG


async def test_nobody_is_ended_while_nobody_waits() -> None:
    crowd = Crowd()
    crowd.fill()
    crowd.now += 1000
    await turn()
    assert (crowd.pending.is_full(), crowd.ended) == (True, [])


async def test_the_oldest_make_room_one_for_one_when_they_have_had_their_time() -> None:
    crowd = Crowd()
    places = crowd.fill()
    crowd.now += crowd.pending.grace
    crowd.wait()
    assert (crowd.ended, crowd.calls) == (["a"], 0)
    crowd.wait()
    assert crowd.ended == ["a", "b"], "somebody asks again: one more has to go"
    places[0].leave()
    await turn()
    assert crowd.calls == 1, "it is told when the place is free, and not before"


async def test_who_has_not_had_its_time_is_waited_for() -> None:
    crowd = Crowd()
    crowd.fill()
    crowd.wait()
    assert crowd.ended == []
    async with asyncio.timeout(10):
        while not crowd.ended:
            crowd.now += crowd.pending.grace / 10
            await asyncio.sleep(crowd.pending.grace / 10)
    assert crowd.ended == ["a"]


async def test_who_introduces_itself_makes_room_too() -> None:
    crowd = Crowd()
    places = crowd.fill()
    crowd.wait()
    places[2].leave()
    places[2].leave()
    await turn()
    assert (crowd.calls, crowd.ended, len(crowd.pending)) == (1, [], 3)


async def test_who_waits_no_more_is_not_called_and_costs_nobody_its_place() -> None:
    crowd = Crowd()
    places = crowd.fill()
    crowd.wait()
    crowd.pending.forget(crowd.call)
    places[0].leave()
    crowd.now += 1000
    crowd.enter("e")
    await turn()
    assert (crowd.calls, crowd.ended) == (0, [])
