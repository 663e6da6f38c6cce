"""A dispatcher inside of another program: it serves, ends in order, leaves the process alone."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVarTuple
from urllib.request import urlopen

import pytest

from rollout_dispatcher import Dispatcher, ServeConfig
from rollout_dispatcher.errors import (
    JournalError,
    ListenerFailed,
    NotServing,
)
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.record.recording import load_recording
from rollout_dispatcher.service import journaling
from tests.service.conftest import SMALL
from tests.support.client import Producer, Trainer
from tests.support.descriptors import open_descriptors
from tests.support.server import series

_T = TypeVarTuple("_T")


def config(**options: object) -> ServeConfig:
    anywhere = {"listen": ["127.0.0.1:0"], "http": "127.0.0.1:0", "buffer_capacity": 100}
    return ServeConfig.model_validate({**SMALL, **anywhere, **options})


async def apart(work: Callable[[*_T], object], *args: *_T) -> None:
    """What clients do, which wait for an answer, in a thread of its own."""
    async with asyncio.timeout(30):
        await asyncio.to_thread(work, *args)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0.001)


def push(endpoint: str, lengths: list[int]) -> None:
    producer = Producer(endpoint, "p")
    producer.push(lengths)
    producer.bye()


def train(endpoint: str, steps: int) -> None:
    trainer = Trainer(endpoint, 2)
    for _ in range(steps):
        assert trainer.train()
    assert trainer.train() == []
    trainer.bye()


def scrape(dispatcher: Dispatcher) -> dict[str, float]:
    with urlopen(f"http://{dispatcher.http_endpoint}/metrics", timeout=10) as answer:
        return series(answer.read().decode())


async def test_it_serves_until_it_is_drained_and_says_what_it_did() -> None:
    async with Dispatcher(config()) as dispatcher:
        await apart(push, dispatcher.endpoint, [3, 4, 5, 6, 7])
        assert dispatcher.statistics().buffered == 5
        training = asyncio.create_task(apart(train, dispatcher.endpoint, 2))
        await until(lambda: dispatcher.statistics().ranks_connected == 2)
        assert await dispatcher.drain()
        await training
        assert await dispatcher.drained()
    at = dispatcher.statistics()  # also afterwards
    assert (at.samples_committed, at.balanced, at.run_state) == (5, True, "drained")
    assert await dispatcher.drained()


async def test_two_in_one_process_know_nothing_of_each_other() -> None:
    async with Dispatcher(config()) as one, Dispatcher(config(dp_size=3)) as other:
        assert one.run_id != other.run_id
        await apart(push, one.endpoint, [3])
        await apart(push, other.endpoint, [3, 4])
        counts: list[dict[str, float]] = []
        for dispatcher in one, other:
            await apart(lambda which: counts.append(scrape(which)), dispatcher)
        assert [count["buffer_samples"] for count in counts] == [1, 2]
        assert await one.stop() is False
        await apart(push, other.endpoint, [5])
        assert other.statistics().buffered == 2  # a producer of the same name says it again
        assert await other.stop() is False


async def test_it_leaves_the_process_alone() -> None:
    def process() -> list[object]:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
        logger = logging.getLogger()
        return [
            *map(signal.getsignal, numbers), logger.level, logger.handlers.copy(),
            gc.get_threshold(), gc.get_freeze_count(), asyncio.get_running_loop(),
        ]  # fmt: skip

    before = process()
    async with Dispatcher(config()):
        assert process() == before
    assert process() == before


def timers(loop: asyncio.AbstractEventLoop) -> list[asyncio.TimerHandle]:
    """What the event loop is still to call; the test's own deadlines are not among them."""
    return [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]


def ends_at(*ports: int) -> Iterator[socket.socket]:
    """Sockets of this process with one of these ports: what listens there, and what it took."""
    for name in open_descriptors():
        try:
            sock = socket.socket(fileno=int(name))
        except OSError:
            continue
        try:
            if sock.family == socket.AF_INET and sock.getsockname()[1] in ports:
                yield sock
        finally:
            sock.detach()


@pytest.mark.parametrize("journal", [False, True])
async def test_a_stop_leaves_nothing_to_the_event_loop(journal: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"journal_dir": tmp_path / "journal"} if journal else {}
    clients: list[Producer | Trainer] = []

    def connect(endpoint: str) -> None:
        producer = Producer(endpoint, "p")
        producer.push([3, 4])
        clients.extend((producer, Trainer(endpoint, 2)))

    async with Dispatcher(config(**options)) as dispatcher:
        ends = [dispatcher.endpoint, dispatcher.http_endpoint]
        ports = [Endpoint.parse(end).port for end in ends]
        assert len(list(ends_at(*ports))) == 2
        await apart(connect, dispatcher.endpoint)
        assert len(list(ends_at(*ports))) == 2 + 3
    at = dispatcher.statistics()
    for _ in range(3):
        await asyncio.sleep(0)  # what was left to it would be done in these turns
    assert timers(asyncio.get_running_loop()) == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not list(ends_at(*ports))
    assert dispatcher.statistics() == at


async def test_a_drain_that_nobody_helps_with_takes_its_time_and_no_more() -> None:
    clients: list[Producer | Trainer] = []

    def take(endpoint: str) -> None:
        producer, trainer = Producer(endpoint, "p"), Trainer(endpoint, 2)
        clients.extend((producer, trainer))
        producer.push([3, 4, 5, 6])
        trainer.take()

    async with Dispatcher(config(drain_timeout="100ms")) as dispatcher:
        await apart(take, dispatcher.endpoint)
        assert await dispatcher.drain() is False
        assert dispatcher.statistics().in_flight == 4


async def test_who_waits_for_the_end_hears_of_a_stop() -> None:
    async with Dispatcher(config()) as dispatcher:
        waiting = asyncio.create_task(dispatcher.drained())
        await asyncio.sleep(0)
        await dispatcher.stop()
        with pytest.raises(NotServing, match="before the stream had ended"):
            await waiting


async def test_it_is_started_once_and_used_in_between() -> None:
    dispatcher = Dispatcher(config())
    for early in dispatcher.statistics, lambda: dispatcher.run_id, lambda: dispatcher.endpoint:
        with pytest.raises(NotServing, match="not started"):
            early()
    with pytest.raises(NotServing):
        await dispatcher.drain()
    assert await dispatcher.stop()  # there is nothing to stop
    await dispatcher.start()
    with pytest.raises(NotServing, match="make another"):
        await dispatcher.start()
    await dispatcher.stop()
    with pytest.raises(NotServing, match="was stopped"):
        await dispatcher.drain()
    with pytest.raises(NotServing):
        await dispatcher.start()


async def test_an_address_that_is_taken_leaves_nothing_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with socket.create_server(("127.0.0.1", 0)) as other:
            free = f"127.0.0.1:{other.getsockname()[1]}"
        port = taken.getsockname()[1]
        dispatcher = Dispatcher(config(listen=[free], http=f"127.0.0.1:{port}"))
        with pytest.raises(OSError, match=rf"--http 127\.0\.0\.1:{port}: .* use.* another --http"):
            await dispatcher.start()
        with pytest.raises(NotServing, match="has no address"):
            assert dispatcher.endpoint
        async with Dispatcher(config(listen=[free])) as second:
            assert second.endpoint == free


async def test_a_start_that_fails_late_leaves_no_address(tmp_path: Path) -> None:
    dispatcher = Dispatcher(config(ready_file=tmp_path / "nowhere" / "ready"))
    with pytest.raises(OSError, match=r"nowhere/ready'$"):
        await dispatcher.start()
    assert dispatcher.endpoints == ()
    assert dispatcher.http_endpoint == ""
    assert timers(asyncio.get_running_loop()) == []


async def test_a_start_that_is_given_up_lets_go_of_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, read = threading.Event(), journaling.read_journal

    def slow(*args: Any) -> Any:
        opened = read(*args)
        goes_on.wait(30)
        return opened

    durable = config(journal_dir=tmp_path / "journal")
    with monkeypatch.context() as patch:
        patch.setattr("rollout_dispatcher.service.dispatcher.read_journal", slow)
        starting = asyncio.create_task(Dispatcher(durable).start())
        await until((tmp_path / "journal" / "index").exists)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    goes_on.set()
    async with asyncio.timeout(20):
        while True:  # another one may have it as soon as the disk has answered
            with contextlib.suppress(JournalError):
                async with Dispatcher(durable):
                    return
            await asyncio.sleep(0.01)


def break_listener(dispatcher: Dispatcher) -> None:
    """Shut its sample plane's socket down, as nobody should: found by its port."""
    for sock in ends_at(Endpoint.parse(dispatcher.endpoint).port):
        sock.shutdown(socket.SHUT_RDWR)


async def broken(*, then: Exception | None = None) -> None:
    """A program whose dispatcher breaks without anybody waiting for it; it raises `then`."""
    async with Dispatcher(config()) as dispatcher:
        break_listener(dispatcher)
        await until(lambda: dispatcher._started.failure is not None)
        if then is not None:
            raise then


async def test_a_failure_is_raised_to_who_waits_and_else_by_the_stop() -> None:
    async with Dispatcher(config()) as watched:
        break_listener(watched)
        with pytest.raises(ListenerFailed, match="nobody can connect"):
            async with asyncio.timeout(10):
                await watched.drained()
    with pytest.raises(ListenerFailed, match="nobody can connect"):
        await broken()
    with pytest.raises(ZeroDivisionError):  # what the program raises itself comes first
        await broken(then=ZeroDivisionError())


async def test_a_watch_that_fails_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("our own bug")

    monkeypatch.setattr("rollout_dispatcher.service.reporter.RunLog.check", fail)
    async with Dispatcher(config()) as dispatcher:
        with pytest.raises(RuntimeError, match="our own bug"):
            async with asyncio.timeout(10):
                await dispatcher.drained()


async def test_the_record_has_what_came_in_until_the_end(tmp_path: Path) -> None:
    async with Dispatcher(config(record_dir=tmp_path)) as dispatcher:
        await apart(push, dispatcher.endpoint, [3, 4])
        assert await dispatcher.stop() is False
    assert [sample.tokens for sample in load_recording(tmp_path).samples.values()] == [3, 4]
