"""A body as it arrives: counted and limited."""

import asyncio
from contextlib import closing

import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from rollout_dispatcher.errors import BodyTooLarge
from rollout_dispatcher.service.connections.receiving import Receiving
from rollout_dispatcher.service.http.bodies import Body


def chunked() -> tuple[web.Request, StreamReader]:
    """A request whose length nobody has said, and what its body arrives at."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    content = StreamReader(protocol, 2**16, loop=loop)
    headers = {"Transfer-Encoding": "chunked"}
    return make_mocked_request("POST", "/", headers, payload=content), content


async def send(content: StreamReader, chunks: list[bytes]) -> None:
    for chunk in chunks:
        content.feed_data(chunk)
        for _ in range(3):  # so that it is read by itself
            await asyncio.sleep(0)
    content.feed_eof()


@pytest.mark.parametrize("nbytes", [1, 100, 2**15])
async def test_chunks_of_any_size_are_counted_until_the_body_is_closed(nbytes: int) -> None:
    receiving = Receiving(2**30, 60.0)
    request, content = chunked()
    sent = [bytes([at % 256]) * nbytes for at in range(200)]
    with closing(Body(receiving)) as body:
        _, found = await asyncio.gather(send(content, sent), body.read(request, 2**27))
        assert receiving.nbytes == 200 * nbytes
    assert found == b"".join(sent)
    assert receiving.nbytes == 0


async def test_it_is_refused_as_soon_as_it_is_too_large() -> None:
    request, content = chunked()
    with closing(Body(Receiving(2**30, 60.0))) as body:
        content.feed_data(bytes(1000))
        reading = asyncio.ensure_future(body.read(request, 1500))
        await asyncio.sleep(0)
        content.feed_data(bytes(501))
        with pytest.raises(BodyTooLarge, match="more than 1500 bytes; push fewer"):
            await reading


async def test_a_connection_that_was_lost_before_its_body_is_no_fault_of_ours() -> None:
    loop = asyncio.get_running_loop()
    lost = BaseProtocol(loop)
    content = StreamReader(lost, 2**16, loop=loop)
    headers = {"Content-Length": "3"}
    request = make_mocked_request("POST", "/", headers, payload=content)
    request.protocol.connected = lost.connected  # type: ignore[misc]  # the rest of it is made up
    with closing(Body(Receiving(2**30, 60.0))) as body, pytest.raises(ConnectionError):
        await body.read(request, 100)
