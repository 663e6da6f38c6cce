"""What breaks behind a running service ends it, at once and with a word; nothing goes on half."""

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rollout_dispatcher.errors import IllegalTransition
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from tests.service.conftest import Serve
from tests.service.wires import SlowLog, Wire, make_router
from tests.support.server import ServeProcess

Deafened = Callable[..., ServeProcess]


@pytest.fixture
def deafened(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deafened:
    """The command, whose listening sockets go at a signal; see `tests.service.deafened`."""
    monkeypatch.setenv("DEAFENED", str(tmp_path / "port"))
    return partial(serve, warm=False, module="tests.service.deafened")


@pytest.mark.parametrize("plane", ["sample", "http"])
def test_a_listener_that_dies_ends_the_service(
    plane: str, deafened: Deafened, tmp_path: Path
) -> None:
    server = deafened()
    at = Endpoint.parse(server.endpoint if plane == "sample" else server.http)
    (tmp_path / "port").write_text(str(at.port))
    server.send_signal(signal.SIGUSR2)
    assert server.wait() == 1
    said = f"nobody can connect to {at} any more"
    assert f"the dispatcher has failed: {said}" in server.log()
    assert f"dispatcher serve: {said}" in server.log()


@pytest.mark.parametrize("broken", ["push", "tick", "producer_disconnected", "planned"])
async def test_a_bug_of_ours_ends_the_service_wherever_the_event_loop_meets_it(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SlowLog()
    router = make_router(log)
    error = RuntimeError("our own bug")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(router.core, broken, fail)
    if broken == "tick":
        monkeypatch.setattr(router.core, "next_deadline", lambda: 0.0)  # it is due at once
    Wire(router, m.HelloRank(client_id="r", dp_rank=0, dp_size=1, hungry=True))
    producer = Wire(router, m.HelloProducer(client_id="p"))
    producer.push_one()
    await log.durable()
    producer.lose()
    with pytest.raises(RuntimeError, match="our own bug"):
        async with asyncio.timeout(10):
            await router.finished()
    assert router.failure is error
    router.close()


async def test_a_move_that_our_own_table_lacks_is_our_bug_and_not_the_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = make_router(SlowLog())
    bug = IllegalTransition("committed", "prepared")

    def fail(*_: object, **__: object) -> None:
        raise bug

    monkeypatch.setattr(router.core, "push", fail)
    producer = Wire(router, m.HelloProducer(client_id="p"))
    producer.push_one()
    assert router.failure is bug
    producer.say(m.Ping())  # nobody has sent it away
    assert producer.heard() == ["WelcomeProducer", "Pong"]
    router.close()
