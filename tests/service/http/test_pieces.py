"""Work in pieces lets other callbacks run."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rollout_dispatcher.service.http.bodies import Work, in_pieces
from tests.service.wires import http_client, make_router


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


async def test_a_small_body_does_not_wait_until_a_large_one_is_read() -> None:
    router = make_router()
    large = b'{"fields": {"input_ids": [' + b"1, " * 1_000_000 + b"1]}}"

    async def in_chunks() -> AsyncIterator[bytes]:  # without a length it counts as it arrives
        yield large

    async with http_client(router) as client:
        posted = asyncio.ensure_future(client.post("/v1/samples", data=in_chunks()))
        while router.receiving.nbytes < len(large):  # noqa: ASYNC110
            await asyncio.sleep(0)
        async with client.post("/v1/samples", data=b"{}") as answer:
            assert answer.status == 400
        assert not posted.done()
        (await posted).release()
    router.close()
