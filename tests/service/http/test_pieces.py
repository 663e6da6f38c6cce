"""Work in pieces lets others in, and one body is worked on at a time, in order."""

import asyncio

import pytest

from rollout_dispatcher.errors import TooManyBodies
from rollout_dispatcher.service.http.bodies import Turns, Work, in_pieces


def counting(to: int, seen: list[str], name: str) -> Work[str]:
    for at in range(to):
        seen.append(f"{name}{at}")
        yield
    return name


async def test_pieces_of_several_works_take_turns_with_everything_else() -> None:
    seen: list[str] = []
    first, second = await asyncio.gather(
        in_pieces(counting(3, seen, "a")), in_pieces(counting(2, seen, "b"))
    )
    assert (first, second) == ("a", "b")
    assert seen == ["a0", "b0", "a1", "b1", "a2"]


async def test_what_work_raises_is_raised() -> None:
    def broken() -> Work[None]:
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_pieces(broken())


class Line:
    """Bodies in line for their turns."""

    def __init__(self, limit: int) -> None:
        self.turns, self.order = Turns(limit), list[str]()
        self.may_end = asyncio.Event()

    def body(self, name: str, *, small: bool = False) -> asyncio.Task[None]:
        async def take() -> None:
            async with self.turns.turn(small=small):
                self.order.append(name)
                await self.may_end.wait()

        return asyncio.create_task(take())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_large_and_one_small_body_have_a_turn_at_a_time_in_order() -> None:
    line = Line(10)
    tasks = [line.body(name, small=name.islower()) for name in ("A", "B", "a", "C", "b")]
    await settle()
    assert line.order == ["A", "a"]
    line.may_end.set()
    await asyncio.gather(*tasks)
    assert line.order[2:] == ["B", "b", "C"]


async def test_no_more_wait_than_may_and_who_leaves_makes_room() -> None:
    line = Line(2)
    first, second, third = (line.body(name) for name in "ABC")
    await settle()
    with pytest.raises(TooManyBodies, match="2 request bodies wait"):
        await line.body("D")
    second.cancel()
    fourth = line.body("E")
    await settle()
    line.may_end.set()
    await asyncio.gather(first, third, fourth)
    assert line.order == ["A", "C", "E"]
