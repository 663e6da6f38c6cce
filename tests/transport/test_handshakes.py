"""A crowd of TLS clients: the newest is answered first, and nobody who has hung up."""

import asyncio
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.security import server_tls
from rollout_dispatcher.transport.listener import ServerTls
from rollout_dispatcher.transport.sockets import listen
from rollout_dispatcher.transport.tls import AT_ONCE, Handshakes
from tests.support.certificates import Authority
from tests.support.listening import Heard
from tests.transport.test_plain import Recorder

CROWD = 48


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_newest_is_next_and_who_has_left_is_passed_over() -> None:
    handshakes, begun = Handshakes(), list[int]()

    async def come(number: int) -> None:
        await handshakes.begin()
        begun.append(number)

    crowd = [asyncio.create_task(come(number)) for number in range(AT_ONCE + 4)]
    await turn()
    assert begun == list(range(AT_ONCE))
    crowd[-1].cancel()
    handshakes.answered()  # before it has noticed
    await turn()
    assert begun[AT_ONCE:] == [AT_ONCE + 2]
    handshakes.answered()
    crowd[AT_ONCE + 1].cancel()  # when its turn has just come
    await turn()
    assert begun[AT_ONCE:] == [AT_ONCE + 2, AT_ONCE], "the turn of who leaves is the next one's"
    for _ in range(AT_ONCE):
        handshakes.answered()
    await asyncio.gather(*(come(number) for number in range(AT_ONCE)))


async def test_a_crowd_that_has_come_again_and_again_is_answered_from_its_end(
    tmp_path: Path,
) -> None:
    """As when clients lose patience and come again before the first of them are answered."""
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    context, answered = server_tls(pair.certificate, pair.key, None), list[str]()
    all_answered = asyncio.Event()

    def answers(_session: object, name: str, _context: object) -> None:
        answered.append(name)
        if len(answered) == CROWD // 2:
            all_answered.set()

    context.sni_callback = answers
    tls = ServerTls(lambda: context, lambda _protocol, _certificate: None, b"")
    heard = Heard(Recorder, tls)
    async with listen(Endpoint("127.0.0.1", 0), heard.handler) as listener:
        at = listener.endpoint.host, listener.endpoint.port
        with ExitStack() as stack:
            for number in range(CROWD):
                sock = stack.enter_context(socket.create_connection(at))
                sock.sendall(first_words(authority.client(), f"client-{number}"))
                if number % 2:
                    sock.close()
            async with asyncio.timeout(10):
                await all_answered.wait()
            await turn()
    stayed = [f"client-{number}" for number in range(0, CROWD, 2)]
    assert sorted(answered) == sorted(stayed), "who has hung up is not answered"
    assert answered[AT_ONCE] == stayed[-1], "the newest comes before who has waited"


def first_words(context: ssl.SSLContext, name: str) -> bytes:
    sent = ssl.MemoryBIO()
    session = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name)
    try:
        session.do_handshake()
    except ssl.SSLWantReadError:
        return sent.read()
    raise AssertionError("nobody has answered")
