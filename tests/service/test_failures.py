"""What breaks behind a running service ends it, at once and with a word; nothing goes on half."""

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rollout_dispatcher.core.effects import NO_TOTALS, Decision, PushAnswered, StepCommitted
from rollout_dispatcher.errors import IllegalTransition
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.sample import Outcome
from tests.service.conftest import Serve
from tests.service.durability.test_barrier import SlowLog
from tests.service.durability.test_behind_the_barrier import Wire, hub_with, push_one
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
    router = hub_with(log)
    error = RuntimeError("our own bug")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(router.core, broken, fail)
    if broken == "tick":
        monkeypatch.setattr(router.core, "next_deadline", lambda: 0.0)  # it is due at once
    producer, rank = Wire(router), Wire(router)
    rank.say(m.HelloRank(client_id="r", dp_rank=0, dp_size=1, hungry=True))
    producer.say(m.HelloProducer(client_id="p"))
    push_one(producer)
    await log.durable(len(log.batches))
    producer.peer.connection_lost(None)
    with pytest.raises(RuntimeError, match="our own bug"):
        async with asyncio.timeout(10):
            await router.finished()
    assert router.failure is error
    router.close()


async def test_a_move_that_our_own_table_lacks_is_our_bug_and_not_the_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = hub_with(SlowLog())
    bug = IllegalTransition("committed", "prepared")

    def fail(*_: object, **__: object) -> None:
        raise bug

    monkeypatch.setattr(router.core, "push", fail)
    producer = Wire(router)
    producer.say(m.HelloProducer(client_id="p"))
    push_one(producer)
    assert router.failure is bug
    producer.say(m.Ping())  # nobody has sent it away
    assert producer.heard() == ["WelcomeProducer", "Pong"]
    router.close()


async def test_what_cannot_be_performed_of_a_decision_holds_up_nothing_else_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = hub_with(SlowLog())
    producer = Wire(router)
    producer.say(m.HelloProducer(client_id="p"))
    ours, answers = StepCommitted(0, 1, 1.0), PushAnswered("p", 0, (Outcome.ACCEPTED,))
    monkeypatch.setattr(router._effect_runner, "_deliveries", None)  # which forgets nothing
    router.perform(Decision([ours, answers], (), NO_TOTALS))
    assert isinstance(router.failure, AttributeError)
    assert producer.heard() == ["WelcomeProducer", "Pushed"]
    router.close()
