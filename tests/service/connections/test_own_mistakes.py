"""What we say out of turn is a bug of ours: it ends one connection, and nothing else.

A real router and a real connection whose transport is memory.
"""

from collections.abc import Callable

import pytest

from rollout_dispatcher.protocol import codec
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.service.connections.peer import Peer
from tests.service.wires import Wire, make_router

#: No producer hears such a thing.
OUT_OF_TURN = m.Release(step=1)


@pytest.mark.parametrize(
    "say",
    [
        lambda peer: peer.send(m.Pong(), OUT_OF_TURN),
        lambda peer: peer.write(codec.encode(OUT_OF_TURN)),
        lambda peer: peer.enqueue(lambda: [codec.encode(OUT_OF_TURN)]),
    ],
    ids=["send", "write", "enqueue"],
)
async def test_who_is_told_something_out_of_turn_is_sent_away_and_nobody_else(
    say: Callable[[Peer], None], caplog: pytest.LogCaptureFixture
) -> None:
    router = make_router(receive_bytes=2**16)
    told, other = (
        Wire(router, m.HelloProducer(client_id="told")),
        Wire(router, m.HelloProducer(client_id="other")),
    )
    say(told.peer)
    say_no_more = len(told.sent)
    told.peer.send(m.Pong())
    assert len(told.sent) == say_no_more
    last = told.messages()[-1]
    assert isinstance(last, m.Error)
    assert last.code == "internal"
    assert "saying Release" in caplog.text
    other.peer.send(m.Pong())
    assert not other.lost
    assert router.failure is None
    told.lose()
    other.lose()
    router.close()


async def test_what_is_said_after_the_last_word_closes_the_connection() -> None:
    router = make_router(receive_bytes=2**16)
    wire = Wire(router, m.HelloProducer(client_id="told"))
    wire.arrives(codec.encode(m.Bye()))
    assert wire.lost
    wire.peer.send(m.Pong())
    assert router.failure is None
    wire.lose()
    router.close()
